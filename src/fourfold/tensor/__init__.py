"""Matrix products on a grid of ranks (Tesseract): the grid, the flows, the layers on it, the swap of a serial model for them."""
