"""Every outside system behind a seam: storage, machines, and the sites."""
