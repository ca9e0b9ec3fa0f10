"""Check that the job names the tokenisers that a data source has loaded.

A token's number means another word with another tokeniser, and sites choose their own
data sources. So the job names the digests, and the same rule holds in a simulation and
at a deployed site. Loading a tokeniser is in ``pretrained``.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from federation.errors import JobError
from federation.job.code_files import unpinned
from federation.job.spec import JobSpec

_KEY = "model.tokenizers"
_LOADED: ContextVar[list[str] | None] = ContextVar("_LOADED", default=None)


@contextmanager
def noted_tokenizers() -> Iterator[Sequence[str]]:
    """Collect the digests of the tokenisers that this thread loads meanwhile.

    A collection around this one gets them as well, at the end.
    """
    loaded: list[str] = []
    token = _LOADED.set(loaded)
    try:
        yield loaded
    finally:
        _LOADED.reset(token)
        for digest in loaded:
            note_tokenizer(digest)


def note_tokenizer(sha256: str) -> None:
    """Note that a tokeniser was loaded, if anyone collects that."""
    loaded = _LOADED.get()
    if loaded is not None:
        loaded.append(sha256)


def check_tokenizers(job: JobSpec, loaded: Sequence[str], *, source: str) -> None:
    """Check that a data source has loaded the tokenisers of the job, and no others.

    Args:
        job: Without ``model.tokenizers`` it allows any.
        loaded: Digests, of ``noted_tokenizers``.
        source: Source of the data. Shards hold numbers, and load no tokeniser.

    Raises:
        JobError: The source has loaded others, fewer or none.
    """
    named = set(job.model.tokenizers)
    if not named or set(loaded) == named or "://" in source:
        return
    found = _listed(loaded) or "none"
    raise JobError(
        f"names {_listed(job.model.tokenizers)}, and the data source "
        f"{unpinned(source)} has loaded {found}: "
        "load the job's tokeniser with clients.models.tokenizer in the function itself",
        key=_KEY,
        outside="the data source here has not loaded the tokenisers of the job",
    )


def notice(job: JobSpec, loaded: Sequence[str]) -> str:
    """Advise to name tokenisers in a job that allows any; empty if it need not.

    Args:
        job: Its ``model.tokenizers`` lists the digests that it allows.
        loaded: Digests, of ``noted_tokenizers``.
    """
    if job.model.tokenizers or not loaded:
        return ""
    listed = ", ".join(f'"{digest}"' for digest in sorted(set(loaded)))
    return (
        "any tokeniser is allowed: to have sites with another one refuse this job, set "
        f"model.tokenizers = [{listed}]"
    )


def check_alike(of_sites: Mapping[str, Sequence[str]]) -> None:
    """Check that the sites of a simulation have loaded the same tokenisers.

    Args:
        of_sites: Digests by site; sites that have loaded none are left out of account.

    Raises:
        JobError: Two sites have loaded different ones.
    """
    first, *others = [(name, ids) for name, ids in of_sites.items() if ids] or [
        ("", ())
    ]
    for name, loaded in others:
        if set(loaded) != set(first[1]):
            raise JobError(
                f"the data of site {first[0]!r} has loaded the tokeniser "
                f"{_listed(first[1])}, and that of site {name!r} {_listed(loaded)}: "
                "use the same files at all sites",
                key=_KEY,
            )


def _listed(digests: Sequence[str]) -> str:
    return ", ".join(sorted(set(digests)))
