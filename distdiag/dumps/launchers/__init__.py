"""What launchers say of a job that failed."""
