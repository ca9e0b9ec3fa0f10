"""Object stores: memory and local folders."""
