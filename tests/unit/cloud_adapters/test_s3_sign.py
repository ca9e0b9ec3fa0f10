"""Signed URLs of S3, against a second implementation of the check."""

import pytest
import requests
from support.s3_server import S3Server

from cloud_adapters.storage.s3.store import S3Store


@pytest.fixture
def store(s3_server: S3Server) -> S3Store:
    return s3_server.store("run")


def put(url: str, content: bytes) -> requests.Response:
    return requests.put(url, data=content, timeout=5)


def check_refused(answer: requests.Response, code: str) -> None:
    assert (answer.status_code, f"<Code>{code}</Code>" in answer.text) == (403, True)


def test_url_lets_others_in(store: S3Store):
    """One writes and another reads, without credentials, under any key."""
    key = "a b/\N{SNOWMAN}+%~?.bin"
    url = store.signed_url(key, method="PUT", expires_seconds=60)
    assert put(url, b"from elsewhere").status_code == 200
    assert store.read(key) == b"from elsewhere"
    url = store.signed_url(key, method="GET", expires_seconds=60)
    assert requests.get(url, timeout=5).content == b"from elsewhere"


def test_url_is_for_one_object_method_and_time(store: S3Store):
    """Whoever changes it has none."""
    url = store.signed_url("key", method="PUT", expires_seconds=60)
    assert put(url, b"x").status_code == 200
    check_refused(requests.get(url, timeout=5), "SignatureDoesNotMatch")
    digit = url[-1]
    changes = (
        ("/key?", "/kez?"),
        ("Expires=60", "Expires=61"),
        (f"{digit}$", "0" if digit != "0" else "1"),
    )
    for old, new in changes:
        changed = f"{url}$".replace(old, new).rstrip("$")
        assert changed != url
        check_refused(put(changed, b"y"), "SignatureDoesNotMatch")
    assert store.read("key") == b"x"


def test_url_ends(store: S3Store, monkeypatch: pytest.MonkeyPatch):
    """After its time it is good for nothing."""
    url = store.signed_url("key", method="PUT", expires_seconds=60)
    monkeypatch.setattr("support.s3_signatures.time.time", lambda: 4e9)
    answer = put(url, b"x")
    check_refused(answer, "AccessDenied")
    assert "Request has expired" in answer.text


@pytest.mark.parametrize(
    ("method", "seconds"),
    [("DELETE", 60), ("GET", 0), ("GET", 8 * 24 * 3600), ("GET", float("nan"))],
)
def test_urls_have_limits(store: S3Store, method: str, seconds: float):
    """Two methods, and seven days at most, which is S3's own limit."""
    with pytest.raises(ValueError, match="URL"):
        store.signed_url("key", method=method, expires_seconds=seconds)
