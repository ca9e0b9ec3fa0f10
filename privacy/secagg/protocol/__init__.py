"""The messages of a secure sum and who does what with them."""
