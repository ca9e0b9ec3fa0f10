"""The fake of Cloud Storage against Google's own client: what tests rest upon."""

from collections.abc import Iterator

import pytest
import requests
from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from support.fake_gcs import FakeGcs


@pytest.fixture
def server() -> Iterator[FakeGcs]:
    with FakeGcs("b") as server:
        yield server


@pytest.fixture
def bucket(
    server: FakeGcs, monkeypatch: pytest.MonkeyPatch
) -> Iterator[storage.Bucket]:
    # A thread that asks for the bucket's place would outlive the server, and draws from
    # `random`, which Hypothesis notices in another test.
    monkeypatch.setenv("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    client = storage.Client(
        project="project",
        credentials=AnonymousCredentials(),
        client_options={"api_endpoint": server.url},
    )
    yield client.bucket("b")
    client.close()


@pytest.mark.parametrize(
    "url",
    [
        "/storage/v1/b/b/o?no=parameter",
        "/storage/v1/b/b/o?maxResults=many",
        "/storage/v1/b/b/o/key?projection=all",
        "/storage/v2/b/b/o",
    ],
)
def test_what_the_document_has_not_is_refused(server: FakeGcs, url: str):
    """Parameters, their values and paths are the discovery document's."""
    answer = requests.get(server.url + url, timeout=5)
    assert answer.status_code == 400
    assert answer.json()["error"]["errors"][0]["reason"] == "invalid"
