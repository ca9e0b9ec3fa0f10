"""Cross-silo secure aggregation (XSA): the aggregator learns sums and nothing else.

Modules over members: import ``privacy.secagg.arithmetic.ring`` and not names from here.
"""
