"""What this adapter uses of Flower that Flower does not promise to keep.

One module per use, and no code but imports: all other files import from here. A new
minor version of Flower may move or change what is named. ``tests/contract/
test_flower_private.py`` compares it with the version that is installed; run it first
when you try a new one.
"""
