"""Checks of sequences that ranks share."""
