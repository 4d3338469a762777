"""What distdiag says of itself."""
