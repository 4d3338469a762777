"""Observe the process: exceptions, children, and what it is busy with."""
