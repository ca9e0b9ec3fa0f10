"""Sessions share descriptions of services, and nothing that belongs to an account."""

import pytest

from cloud_adapters.net.aws_session import new_session

REGION = "us-east-1"


def test_a_description_is_parsed_once():
    """EC2's takes half a second, and a command that watches opens many sessions."""
    one, other = (new_session().client("sts", REGION) for _ in range(2))
    assert one.meta.service_model.metadata is other.meta.service_model.metadata


def test_sessions_look_for_descriptions_in_the_same_folders():
    """However many a long command opens."""
    one, other = (
        new_session()._session.get_component("data_loader").search_paths
        for _ in range(2)
    )
    assert one == other
    assert len({*one}) == len(one)


def test_each_session_reads_its_own_credentials(monkeypatch: pytest.MonkeyPatch):
    """After a login, the next session has the new ones."""
    for key in ("first", "second"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        credentials = new_session().get_credentials()
        assert credentials is not None
        assert credentials.access_key == key
