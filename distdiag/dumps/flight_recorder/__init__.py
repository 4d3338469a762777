"""Dumps of the flight recorder of torch: read, compared over all ranks, told as events."""
