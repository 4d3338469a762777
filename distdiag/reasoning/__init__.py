"""What the checks share: who is at fault, why ranks came apart, how to say it."""
