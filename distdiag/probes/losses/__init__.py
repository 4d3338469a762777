"""Observe losses and what each element of them weighs."""
