"""Training: data, loop, optimizer, checkpoints, metrics, and the worker that assembles a rank."""
