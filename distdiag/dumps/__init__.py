"""Evidence that comes from outside a rank: the stacks and the state of its process."""
