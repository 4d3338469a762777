"""Checks of what differs between runs on different numbers of ranks."""
