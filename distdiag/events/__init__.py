"""What is observed: one module for each subject."""
