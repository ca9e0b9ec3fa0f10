"""Several processes that train as one site: its ranks."""
