"""What is wrong with a host, a site or a store, and what mends it."""
