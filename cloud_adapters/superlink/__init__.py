"""Around Flower's SuperLink: who may use it, and what may be stored there."""
