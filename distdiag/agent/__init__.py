"""distdiag in a training process: it starts, keeps the records of one rank, and ends."""
