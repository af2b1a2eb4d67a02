"""How ranks start: on this machine."""
