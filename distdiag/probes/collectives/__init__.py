"""Observe collectives, process groups and the store of the job."""
