"""Observe the data that ranks are fed."""
