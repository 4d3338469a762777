"""What a folder of artifacts says on why a run is wrong."""
