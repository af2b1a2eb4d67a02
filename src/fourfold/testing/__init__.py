"""For our tests and yours: ranks started in a test."""
