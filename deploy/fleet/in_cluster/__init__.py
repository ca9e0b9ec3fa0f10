"""An aggregator in a pod, which is the head of its deployment and starts its sites."""
