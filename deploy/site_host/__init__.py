"""What runs on a site's host."""
