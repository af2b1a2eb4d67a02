"""Tensor parallelism on a grid of ranks (Tesseract): the grid, the flows, its layers, and the conversion of a serial model."""
