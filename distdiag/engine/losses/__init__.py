"""Puts losses and gradients side by side."""
