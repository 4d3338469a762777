"""Tests that run on several ranks: what the pytest plugin does with its processes."""
