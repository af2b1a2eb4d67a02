"""What is saved and loaded: checkpoints, weights of Hugging Face folders and DCPs, adapters, exports."""
