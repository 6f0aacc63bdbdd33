"""The order of samples and their division among ranks: pure arithmetic, and its saved state."""

from loaderkit.sampling.random import uniforms
from loaderkit.sampling.schedule import BatchSampler
from loaderkit.sampling.state import State

__all__ = ["BatchSampler", "State", "uniforms"]
