"""The YAML: its model, its checks, its messages."""
