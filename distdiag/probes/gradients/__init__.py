"""Observe gradients between backward pass and optimizer step."""
