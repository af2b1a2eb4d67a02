"""Starting ranks: on this machine, under torchrun, under srun."""
