"""Who a process is in a cloud, and what it may do there."""
