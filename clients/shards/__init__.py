"""Datasets in an object store: shards that stock tools read, and an index."""
