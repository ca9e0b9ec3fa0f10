"""A folder of this machine as a store, and large objects to and from files."""
