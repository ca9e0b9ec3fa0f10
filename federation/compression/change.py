"""A model as its change since the previous one, and a digest of the result.

Both sides add the same words to the same model, so they hold the same bits afterwards.
What the codec leaves out of a change, the aggregator may add to the next one: then its
residual is a part of the run's durable state.

Shape suffixes: d float values of the model.
"""

import numpy as np

from federation import mapped
from federation.compression.codec import Codec, Links
from federation.mapped import give_back
from federation.protocols import ModelChange
from federation.vectors import Vector, Words, chunks


def digest(weights_d: Vector) -> str:
    """SHA-256 of a model's values, 64 hexadecimal digits."""
    return mapped.sha256(weights_d).hex()


# In place of what changed in a model that did not.
NO_WORDS: Words = np.zeros(0, np.uint64)
NO_WORDS.flags.writeable = False
RESIDUAL = "down_residual"  # Its name among the vectors of the run's state.


def first_residual(links: Links, size: int) -> dict[str, Vector]:
    """Return the residual of a run that begins, by its name, if it needs one."""
    if not (links.changes and links.down_feedback):
        return {}
    return {RESIDUAL: np.zeros(size, np.float32)}


def settle(
    links: Links,
    old_d: Vector,
    new_d: Vector,
    *,
    residual_d: Vector | None = None,
    seed: int = 0,
) -> ModelChange:
    """Encode a change; ``new_d`` then holds ``old_d`` with the decoded change.

    Args:
        links: The job's codecs.
        old_d: The model before, shape ``(d,)``.
        new_d: The model that is wanted, shape ``(d,)``.
        residual_d: What earlier changes have left out; replaced.
        seed: The round that ends with the change.

    Raises:
        BeyondCodec: The change cannot be encoded; ``new_d`` and ``residual_d`` are of
            no use then.
    """
    codec = links.down
    np.subtract(new_d, old_d, out=new_d)
    out = np.empty(codec.num_words(new_d.size), codec.dtype)
    if residual_d is not None:
        residual_d *= np.float32(links.down_feedback)
    words = codec.encode(new_d, out=out, residual_d=residual_d, seed=seed)
    words.flags.writeable = False
    add(codec, old_d, words, out_d=new_d, seed=seed)
    return ModelChange(words=words, after=digest(new_d))


def add(
    codec: Codec, old_d: Vector, words: Words, *, out_d: Vector, seed: int = 0
) -> Vector:
    """Add a change to a model, chunk by chunk."""
    values = codec.values(words, size=old_d.size, seed=seed)
    for piece in chunks(old_d.size):
        np.add(old_d[piece], values[piece], out=out_d[piece])
        give_back(old_d[piece])
        give_back(out_d[piece])
    return out_d
