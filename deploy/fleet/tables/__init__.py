"""Tables of the deployment file, each with what would be wrong in it."""
