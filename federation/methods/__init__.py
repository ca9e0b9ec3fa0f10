"""Optional methods, each described once: its key, what it keeps, what it excludes."""
