"""A process that a signal ends says which, and who sent it."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from cloud_adapters.local import process_end
from cloud_adapters.local.process_end import ProcessEnded


@pytest.fixture
def flowers_handlers() -> Iterator[None]:
    """Handlers that end the process without a word, as Flower's do."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: sys.exit(0)) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("flowers_handlers")
def test_signal_is_named():
    """With the exit code that Flower has chosen."""
    process_end.explain(os.getppid())
    with pytest.raises(ProcessEnded) as end:
        signal.raise_signal(signal.SIGTERM)
    assert end.value.code == 0
    assert end.value.why == (
        "SIGTERM ended it: the service was stopped, or someone killed it"
    )


@pytest.mark.usefixtures("flowers_handlers")
def test_killed_parent_is_named():
    """Flower raises SIGINT when the SuperExec is gone."""
    gone = os.getpid()  # Never our own parent.
    process_end.explain(gone)
    with pytest.raises(ProcessEnded) as end:
        signal.raise_signal(signal.SIGINT)
    assert end.value.why.startswith(f"its SuperExec (process {gone}) ended")
