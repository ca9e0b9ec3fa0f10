"""Which machines to have, and when: pure rules, without a cloud."""
