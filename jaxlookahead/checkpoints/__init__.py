"""Checkpoints: GGUF files and Hugging Face directories, tensor by tensor."""
