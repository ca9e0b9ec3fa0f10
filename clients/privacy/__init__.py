"""A site's promises, spending and refusals; the code hash covers all of it."""
