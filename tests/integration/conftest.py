"""What integration tests have in common."""

import pytest
from support.buckets import storage_table
from support.commands import ForkServer


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> ForkServer:
    """Runs commands without paying for torch's import each time."""
    return ForkServer(tmp_path_factory.mktemp("output"))


@pytest.fixture(params=["s3", "gs"])
def bucket(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """The table ``storage`` of a job that keeps its runs in a new bucket."""
    return storage_table(request, monkeypatch)
