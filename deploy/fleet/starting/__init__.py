"""What machines do when they start."""
