"""What the RAS subsystem of NCCL knows of a job."""
