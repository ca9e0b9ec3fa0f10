"""Machines of a cloud, and of this host: started, found again, ended."""
