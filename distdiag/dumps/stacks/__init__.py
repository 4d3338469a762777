"""Stacks: dumped from processes, and read from text and JSON."""
