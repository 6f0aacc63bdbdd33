"""Memory and streams of CUDA devices: which device, its streams, pinned and registered host memory."""
