"""Ways by which the events of ranks reach the engine."""
