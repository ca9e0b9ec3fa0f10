"""Reports and progress of a run. Reads only events."""
