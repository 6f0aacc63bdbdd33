"""The checkpoints of a training job: when to save, what to keep, which to restore; `CheckpointManager`."""
