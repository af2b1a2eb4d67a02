"""Training: the worker that assembles a rank, the loop, the optimizer, metrics and traces."""
