"""Measures `distdiag parity`: right runs must agree with one rank, broken ones must be blamed."""
