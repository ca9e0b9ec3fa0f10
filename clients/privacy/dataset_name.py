"""The operator's name for the data, under which the site remembers everything.

Budget, sums and groups all go by this name. It must not be the job's, which an
aggregator writes, nor follow from where the data are: the same records at another
place have spent what they have, and were summed with whom they were. So the name is
the operator's, and a site notes which data it was given to. Data that have one keep it:
under another name their budget would start again.

A digest of the data, cheap for any size, is noted too. It shows that data have changed
under their name, for a warning. It decides nothing: a record beyond the sample may
change unnoticed.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from clients.data.datasets import Dataset
from clients.privacy.site_memory import SiteMemory
from clients.randomness import seeded_globally
from clients.shards.dataset import ShardedDataset
from federation.errors import JobError
from federation.tree import leaves

DOCUMENT = "datasets"


def dataset_name(
    memory: SiteMemory, name: str, *, source: str, options: Mapping[str, Any]
) -> str:
    """Return the name by which a site remembers its data; durable on return.

    Args:
        memory: The site's.
        name: What the operator calls them.
        source: Where they are; empty for a part of the job's own dataset.
        options: How they are opened.

    Raises:
        JobError: The operator has called them otherwise before.
        StoreError: The memory cannot be read or made durable.
    """
    place = lineage(dataset=source, options=options)
    known = memory.read(DOCUMENT).get(place)
    if known is None:
        known = memory.update(DOCUMENT, lambda old: {place: name, **old})[place]
    if known != name:
        raise JobError(
            f"site.toml calls the site's data {name!r} (data.name), and its memory "
            f"calls data of this source {known!r}: by that name it remembers what they "
            f"have spent, and with whom they were summed. Set data.name to {known!r}; "
            "if these are other people's records, remove "
            f"memory/{DOCUMENT}.json"
        )
    return name


def lineage(*, dataset: str, options: Mapping[str, Any]) -> str:
    """Digest the data's name or place, and the options to open it."""
    text = json.dumps([dataset, dict(options)], sort_keys=True, default=str)
    digest = hashlib.sha256(b"crossfed/lineage\0" + text.encode())
    return digest.hexdigest()


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
