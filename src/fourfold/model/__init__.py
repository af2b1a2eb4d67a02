"""The models, plain and serial: GPT, BERT and Llama, their shapes as data, and Hugging Face files."""
