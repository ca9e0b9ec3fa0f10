"""A process's identity in a cloud, and its permissions there."""
