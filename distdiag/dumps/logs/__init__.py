"""What launchers, libraries and ranks write to logs."""
