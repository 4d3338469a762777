"""What is particular to one library."""
