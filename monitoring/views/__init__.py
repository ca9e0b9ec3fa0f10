"""What the events of a run come to."""
