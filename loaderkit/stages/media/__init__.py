"""Video and sound: clips and windows of files, decoded by FFmpeg (PyAV), and image stages on the frames of a clip."""
