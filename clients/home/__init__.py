"""A site's home: keys, ledgers and memory in a store that outlives its machine."""
