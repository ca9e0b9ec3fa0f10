"""From the launch of a machine until its site is ready."""
