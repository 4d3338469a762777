"""Looks at jobs that run now, with or without an agent: who the ranks are, and where they stand."""
