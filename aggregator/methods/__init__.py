"""Optional methods at the aggregator, each a guest in the rounds of a run."""
