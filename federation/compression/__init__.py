"""How float vectors travel: codecs, for the way up and the way down."""
