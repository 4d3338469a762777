"""What the kernel knows of a process."""
