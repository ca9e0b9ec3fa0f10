"""Differential privacy: noise on the integer grid, accounting, and the ledger.

What is proved, and about what, is in ``docs/explanation/differential-privacy.md``.
"""
