"""What observes inside the training process; the only home of torch hooks."""
