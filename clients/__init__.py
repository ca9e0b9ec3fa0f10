"""What runs at a site: data, models, local training, and the answer to a task."""
