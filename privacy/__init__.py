"""Privacy: what keeps one site's update from the others and from the aggregator."""
