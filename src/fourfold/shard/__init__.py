"""Units: parameters that are gathered and reduced together, as views of one flat buffer."""
