"""What a run asks of the bucket that it is kept in: requests, as a bill counts them.

The coordinator's, with one checkpoint a round, as `docs/howto/run-in-a-bucket.md`
counts them: not the last copies of its files, nor the stores of sites.
"""

from dataclasses import dataclass

# With each checkpoint: its manifest, and the copy of the run's events.
_FILES = 2
# At the start; then with each checkpoint those that tell what may be removed.
_FIRST_LISTS, _LISTS = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketRequests:
    """Requests of a run, by what they cost.

    Attributes:
        writes: Those that write or list.
        reads: Those that read. Clouds charge nothing for those that delete.
    """

    writes: int
    reads: int


def requests_of_run(
    model_bytes: int, *, rounds: int, keep: int, vectors: int, chunk_bytes: int
) -> BucketRequests:
    """Count the requests of a run.

    Args:
        model_bytes: Size of the model's floats.
        rounds: Rounds of the run; it also saves what it begins with.
        keep: Checkpoints that are kept.
        vectors: Vectors of the model's size that the server's optimiser remembers.
        chunk_bytes: A larger blob is stored in objects of this size, whose list is read
            before each is written.
    """
    blobs = [model_bytes, *([vectors * model_bytes] * bool(vectors))]
    objects = sum(max(1, -(-size // chunk_bytes)) for size in blobs)
    chunked = sum(size > chunk_bytes for size in blobs)
    saves = rounds + 1
    lists = _FIRST_LISTS + _LISTS * rounds + chunked * saves
    return BucketRequests(
        writes=saves * (objects + _FILES) + lists,
        # Before an object is deleted, someone looks whether it is still the same.
        reads=max(0, saves - keep) * objects,
    )
