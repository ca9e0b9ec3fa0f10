"""nginx as the aggregator's front door."""
