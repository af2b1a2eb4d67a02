"""Data: from files to token ids, and the samples of every step. No torch."""
