"""distdiag beside the ranks of one node: it reads, compares, and dumps what hangs."""
