"""Where the parts meet: data, loop, optimizer, checkpoints, metrics, and the worker that assembles them."""
