"""What runs on the aggregator's host."""
