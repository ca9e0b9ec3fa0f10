"""While a run goes on: keep its machines, and change their sizes."""
