"""One site's training: a round's steps, private ones too, and its update."""
