"""What a job is, what a round is, the seams, and the round loop.

Imports nothing but the standard library and NumPy.
"""
