"""Keys that wrap the keys of objects: in a file of this machine, or in a cloud."""
