"""Statistics of a site's records: reading columns, adding them up, noise."""
