"""Checks of the data that ranks are fed."""
