"""Methods that take part in a site's local steps, one module each."""
