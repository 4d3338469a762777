"""Checks of how a job was launched."""
