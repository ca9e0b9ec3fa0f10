"""The round loop, its gathering and its records."""
