"""One fork server for all integration tests of a process."""

from collections.abc import Iterator

import pytest
from support.commands import ForkServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    """Runs commands without paying for torch's import each time."""
    running = ForkServer(tmp_path_factory.mktemp("output"))
    yield running
    running.close()
