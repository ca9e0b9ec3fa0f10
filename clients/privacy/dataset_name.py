"""The operator's name for the data, under which the site remembers everything.

Budget, sums and groups all go by this name. It must not be the job's, which an
aggregator writes, nor follow from where the data are: the same records at another
place have spent what they have, and were summed with whom they were. So the name is
the operator's, and a site notes which data it was given to. Data that have one keep it:
under another name their budget would start again.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from clients.privacy.site_memory import SiteMemory
from federation.errors import JobError

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
