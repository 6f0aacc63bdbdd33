"""Writes a state as safetensors files that Hugging Face's loaders read: decides which tensor goes where, and collects
it from all ranks."""
