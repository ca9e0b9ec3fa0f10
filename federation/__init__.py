"""What a job is, what a round is, the seams, and the round loop.

Imports nothing but the standard library and NumPy.
"""

# All our packages: code whose errors are worded for users. ``crossfed`` reads it before
# it imports anything else of ours, so nothing is imported here.
OURS = (
    "federation",
    "privacy",
    "clients",
    "aggregator",
    "cloud_adapters",
    "monitoring",
    "deploy",
)
