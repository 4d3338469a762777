"""Record one run for a comparison with another."""
