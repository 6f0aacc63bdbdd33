"""Writes a state as safetensors files that Hugging Face's loaders read: which tensor goes where, brought from all ranks."""
