"""Host offload: the streamed optimizer, and activations saved in host memory."""
