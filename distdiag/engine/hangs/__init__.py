"""Who waits for whom, and when a job counts as standing still."""
