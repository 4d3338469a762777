"""Real bugs of distributed training, each with its fix, and the runner that scores tools."""
