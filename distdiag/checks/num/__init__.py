"""Checks of the numbers of a training: what is not finite, lost, or out of proportion."""
