"""What checks conclude, how it is kept, and how it reads."""
