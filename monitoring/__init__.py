"""What a person sees of a run. Reads events only."""
