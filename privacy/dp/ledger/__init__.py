"""What a site has released, written down before it is released."""
