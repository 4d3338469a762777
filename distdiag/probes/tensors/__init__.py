"""Read tensors without changing anything for the program."""
