"""What checks are shown: the events of ranks, put side by side."""
