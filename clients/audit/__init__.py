"""An attack on a site's own privacy: canaries, and what an observer makes of them."""
