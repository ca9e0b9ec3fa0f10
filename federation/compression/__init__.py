"""How float vectors are sent: codecs, for both directions."""
