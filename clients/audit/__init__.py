"""An attack on a site's own privacy: canaries, and an observer's scores."""
