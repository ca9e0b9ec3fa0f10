"""The part of a job that determines what a site computes and reveals.

There is one definition, here. The contract of secure aggregation and every mask key, a
checkpoint, a site's record of a run and its ledger all use it, so none of them can
disagree on whether two jobs are the same.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from federation.job import job_file
from federation.job.spec import SURROGATE, JobSpec
from federation.methods.method import default_of
from federation.methods.registry import METHODS

DIGEST_BYTES = 32


def _plain_default(key: str) -> object:
    found = default_of(JobSpec, key)
    return list(found) if isinstance(found, tuple) else found


# Where results are kept, how a simulation is played, how long a round may take: no
# site computes anything else because of these, and an operator may change them
# when a run is resumed.
EXCLUDED_TABLES = ("storage", "simulation")
EXCLUDED_KEYS = (
    *(("schedule", "round_deadline_seconds"), ("schedule", "grace")),
    *(("schedule", "memory_mib"), ("schedule", "gpu_memory_mib")),
)
# Keys that came after runs of earlier releases, with the value that does what those
# did. With it they are left out, so that such a run continues and its digest stays.
ADDED: tuple[tuple[tuple[str, ...], object], ...] = (
    (("training", "optimizer", "adamw_parameters"), []),
    (("training", "metrics"), {}),
    (("training", "classes"), []),
    (("training", "options"), {}),
    (("training", "measures"), []),
    (("training", "subgroups"), []),
    (("training", "subgroup_column"), ""),
    (("training", "min_subgroup"), 10),
    (("training", "optimizer", "options"), {}),
    (("training", "learning_rate", "options"), {}),
    (("training", "max_tokens"), 1 << 16),
    (("training", "inputs"), []),
    (("training", "standardise"), ""),
    (("training", "moments"), {}),
    (("training", "moments_privacy"), []),
    (("communication", "down_codec"), {"name": "identity"}),
    (("communication", "down_content"), "model"),
    (("privacy", "differential_privacy", "records_per_person"), 8),
    (("model", "tokenizers"), []),
    (("model", "frozen"), []),
    (("privacy", "differential_privacy", "max_noise_multiplier"), None),
    (("schedule", "buffer_size"), None),
    (("schedule", "max_staleness"), 10),
    *(
        (tuple(key.split(".")), _plain_default(key))
        for method in METHODS
        if not method.always_decides
        for key in (method.key, *method.parts)
    ),
)


def deciding(job: JobSpec) -> dict[str, Any]:
    """Return the job as a document, without irrelevant keys.

    Every other key is in it, defaults too, but for those of ``ADDED``: a key that is
    added to the job file counts until someone excludes it here.
    """
    return what_decides(job_file.document(job))


def what_decides(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's document without irrelevant keys.

    Also of one that an older release has written, which may hold fewer of them.
    """
    kept = dict(document)
    played = kept.get("simulation")
    for table in EXCLUDED_TABLES:
        kept.pop(table, None)
    if isinstance(played, Mapping) and played.get("training") == SURROGATE:
        kept["simulation"] = {"training": SURROGATE}  # Its updates are of no use.
    for table, key in EXCLUDED_KEYS:
        if isinstance(kept.get(table), Mapping):
            kept[table] = {k: v for k, v in kept[table].items() if k != key}
    for path, value in ADDED:
        kept = _without(kept, path, value)
    return kept


def _without(
    document: Mapping[str, Any], path: tuple[str, ...], value: Any
) -> dict[str, Any]:
    """Return a document without a key, if the key has this value."""
    first, *rest = path
    inner = document.get(first)
    if rest and isinstance(inner, Mapping):
        return {**document, first: _without(inner, tuple(rest), value)}
    return {k: v for k, v in document.items() if rest or k != first or v != value}


def digest(job: JobSpec) -> bytes:
    """Return SHA-256 of ``deciding`` as canonical JSON, 32 bytes.

    Keys are sorted, there is no white space, and a float is its shortest decimal that
    reads back as the same float: the same job has the same digest on every machine.
    """
    text = json.dumps(
        deciding(job), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(b"crossfed/job\0" + text.encode()).digest()
