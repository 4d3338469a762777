"""What the GPU driver knows of the GPUs of a node."""
