"""The round loop, what it gathers and what it keeps."""
