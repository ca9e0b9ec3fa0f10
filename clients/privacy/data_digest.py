"""A digest of a site's data, cheap for any size.

It shows that data have changed under their name, for a warning. It decides nothing: a
record beyond the sample may change unnoticed.
"""

import hashlib

import numpy as np
import torch

from clients.data.datasets import Dataset
from clients.randomness import seeded_globally
from clients.shards.dataset import ShardedDataset
from federation.tree import leaves

SAMPLED_EXAMPLES = 128
_AT_ONCE = 16
_CPU = torch.device("cpu")


def digest(train: Dataset, held_out: Dataset) -> str:
    """Return 64 hexadecimal digits for the content of a site's data.

    Of data in shards it is made of the index, which has the digest of every shard. Of
    others it is made of the number of examples and of up to ``SAMPLED_EXAMPLES`` in
    each part, evenly spaced. Examples that differ when they are read again, as with
    random transforms, are left out.
    """
    found = hashlib.sha256(b"crossfed/data\0")
    for part in (train, held_out):
        found.update(len(part).to_bytes(8, "big"))
        if isinstance(part, ShardedDataset):
            found.update(part.index.version.encode())
        elif (sample := _sample(part)) == _sample(part):
            found.update(sample)
    return found.hexdigest()


def _sample(part: Dataset) -> bytes:
    size = len(part)
    places = np.linspace(0, size - 1, min(size, SAMPLED_EXAMPLES)).astype(np.int64)
    found = hashlib.sha256()
    with seeded_globally(0, _CPU):  # What a transform draws, training must not miss.
        for start in range(0, len(places), _AT_ONCE):
            for values in leaves(part.batch(places[start : start + _AT_ONCE])):
                found.update(values.numpy().tobytes())
    return found.digest()
