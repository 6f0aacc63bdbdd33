"""From a configuration to a running loader."""
