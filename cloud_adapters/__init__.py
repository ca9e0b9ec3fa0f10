"""Every outside system behind a seam: storage, and the way to the sites."""
