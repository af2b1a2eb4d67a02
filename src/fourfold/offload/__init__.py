"""The streamed optimizer and activation offload: what is not needed now waits in host memory."""
