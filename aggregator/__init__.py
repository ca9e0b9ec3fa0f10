"""What the server does with updates: combine, step, checkpoint."""
