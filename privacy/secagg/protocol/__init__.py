"""The messages of a secure sum, and each party's part in it."""
