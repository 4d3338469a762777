"""Runs distdiag in front of real programs under the real launcher."""
