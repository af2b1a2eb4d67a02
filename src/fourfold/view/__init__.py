"""Pictures for people. No torch."""
