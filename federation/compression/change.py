"""A model as its change since the previous one, and a digest of the result.

Both sides add the same words to the same model, so they hold the same bits afterwards.

Shape suffixes: d float values of the model.
"""

import numpy as np

from federation import mapped
from federation.compression.codec import Codec
from federation.protocols import ModelChange
from federation.vectors import Vector, Words, chunks


def digest(weights_d: Vector) -> str:
    """SHA-256 of a model's values, 64 hexadecimal digits."""
    return mapped.sha256(weights_d).hex()


def settle(codec: Codec, old_d: Vector, new_d: Vector) -> ModelChange:
    """Encode a change; ``new_d`` then holds ``old_d`` with the decoded change.

    Raises:
        BeyondCodec: The change cannot be encoded; ``new_d`` is of no use then.
    """
    np.subtract(new_d, old_d, out=new_d)
    out = np.empty(codec.num_words(new_d.size), codec.dtype)
    words = codec.encode(new_d, out=out)
    words.flags.writeable = False
    add(codec, old_d, words, out_d=new_d)
    return ModelChange(words=words, after=digest(new_d))


def add(codec: Codec, old_d: Vector, words: Words, *, out_d: Vector) -> Vector:
    """Add a change to a model, chunk by chunk."""
    values = codec.values(words)
    for piece in chunks(old_d.size):
        np.add(old_d[piece], values[piece], out=out_d[piece])
    return out_d
