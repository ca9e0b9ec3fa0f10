"""Before a run begins: what it will send, take and cost."""
