"""Puts models, their optimizers and their checkpoints side by side."""
