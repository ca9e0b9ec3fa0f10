"""What all parties of a secure sum agree to, and each one's policy."""
