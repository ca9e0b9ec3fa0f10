"""Notices of a cloud that it is about to take a machine back."""

from collections.abc import Iterator

import pytest
from support.fake_imds import FakeImds
from support.fake_metadata import metadata

from cloud_adapters.compute.notices import Ec2Notices, Notice, gce
from federation.clock import VirtualClock

AT = 1_795_456_800.0  # 2026-11-23T18:00:00Z


@pytest.fixture
def imds(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeImds]:
    with FakeImds() as server:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", server.url)
        yield server


def test_ec2_says_what_it_does_and_when(imds: FakeImds):
    """Before it does there is no notice."""
    look = Ec2Notices(VirtualClock(AT), print)
    assert look() is None
    imds.action = {"action": "terminate", "time": "2026-11-23T18:01:30Z"}
    assert look() == Notice(seconds=90.0, text="EC2 will terminate this machine")


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("2026-11-23T17:00:00Z", 0.0),  # This machine's clock is an hour ahead,
        ("2026-11-23T19:00:00Z", 120.0),  # or behind: EC2 waits two minutes at most.
        ("soon", 120.0),
        ("", 120.0),
    ],
)
def test_a_wrong_clock_makes_no_notice_longer(
    imds: FakeImds, time: str, seconds: float
):
    imds.action = {"action": "stop", "time": time}
    found = Ec2Notices(VirtualClock(AT), print)()
    assert found is not None
    assert found.seconds == seconds


def test_a_recommendation_is_told_once_and_ends_nothing(imds: FakeImds):
    told: list[str] = []
    look = Ec2Notices(VirtualClock(AT), told.append)
    imds.rebalance = True
    assert [look(), look()] == [None, None]
    assert told == ["EC2 recommends to replace this machine; it stays for now"]


def test_a_token_that_is_refused_is_asked_for_again(imds: FakeImds):
    """It expires after six hours."""
    look = Ec2Notices(VirtualClock(AT), print)
    assert look() is None
    imds.action = {"action": "terminate", "time": ""}
    look._token = "an old one"  # noqa: S105
    assert look() is None
    assert look() is not None


def test_a_body_that_is_no_json_is_still_a_notice(imds: FakeImds):
    """Whatever stands there, EC2 gives 404 as long as nothing is to happen."""
    imds.action = {"action": "x"}
    look = Ec2Notices(VirtualClock(AT), print)
    assert look() == Notice(seconds=120.0, text="EC2 will x this machine")


def test_compute_engine_says_that_it_preempts(monkeypatch: pytest.MonkeyPatch):
    is_preempted = False
    with metadata(lambda: is_preempted) as server:
        monkeypatch.setenv("GCE_METADATA_HOST", server.url.partition("//")[2])
        look = gce()
        assert look() is None
        is_preempted = True
        text = "Compute Engine preempts this machine"
        assert look() == Notice(seconds=30.0, text=text)


def test_nobody_answers_and_no_proxy_is_asked(monkeypatch: pytest.MonkeyPatch):
    """A metadata service that is not there is no notice, and no error."""
    with metadata(lambda: True) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        assert Ec2Notices(VirtualClock(AT), print)() is None
        assert gce()() is None
        assert not proxy.requests
