"""Views of a run's events."""
