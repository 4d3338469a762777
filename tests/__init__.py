"""Tests of distdiag, one file for each of its modules."""
