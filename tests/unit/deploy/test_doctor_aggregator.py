"""Whether an aggregator can serve: what is said of what is wrong."""

import os
import socket
from pathlib import Path

import pytest
from support.enrolments import Federation

from deploy import (
    doctor_aggregator,
    doctor_exchange,
    enrolment_operator,
    folder_lock,
    host_secrets,
)
from deploy.doctor import Check
from deploy.exchange import ExchangeSpec
from deploy.ports import LOOPBACK, free_port
from federation.clock import SystemClock

DAY = 86400.0


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    made = Federation(folder=tmp_path)
    host_secrets.make(made.aggregator)
    write(made, f'listen = "{LOOPBACK}:{free_port()}"\nproxy = false\n')
    return made


def write(federation: Federation, text: str) -> None:
    text = f'hosts = ["127.0.0.1"]\n{text}'
    (federation.aggregator / "aggregator.toml").write_text(text)


def examined(federation: Federation) -> dict[str, Check]:
    path = federation.aggregator / "aggregator.toml"
    found = doctor_aggregator.checks(path, federation.clock)
    return {each.name: each for each in found}


def problems(federation: Federation) -> set[str]:
    found = examined(federation).values()
    return {each.name for each in found if each.status == "problem"}


def test_sound_aggregator_has_no_problem(federation: Federation):
    """Each thing that was looked at has a line."""
    federation.site("site-a")
    found = examined(federation)
    assert not problems(federation)
    assert found["sites"].found == "1 are enrolled"
    assert found["certificate"].found == "the server's holds for 90 days"
    assert "is free" in found["service"].found
    assert "refused" in found["exchange"].found


def test_aggregator_without_sites_has_no_problem(federation: Federation):
    """Its roster is a draft until the first has enrolled."""
    found = examined(federation)
    assert not problems(federation)
    assert found["roster"].status == "warning"
    assert "pins no site yet" in found["roster"].found


def test_port_that_another_has(federation: Federation):
    """Unless it is the service's own."""
    with socket.create_server((LOOPBACK, 0)) as server:
        write(federation, f'listen = "{LOOPBACK}:{server.getsockname()[1]}"\n')
        assert "service" in problems(federation)
        with folder_lock.hold(federation.config.lock, "taken"):
            assert "is served" in examined(federation)["service"].found


def test_older_book_is_a_problem(federation: Federation):
    """Until the service has started, which mends it."""
    federation.site("site-a")
    book = federation.aggregator / "sites.json"
    copy = book.read_bytes()
    federation.revoke("site-a")
    assert "sites" not in problems(federation)
    book.write_bytes(copy)
    assert "forgotten that site-a was revoked" in examined(federation)["sites"].found
    enrolment_operator.prepare(federation.config, clock=federation.clock)
    assert "sites" not in problems(federation)


def test_certificate_that_ended_or_lacks_a_host(federation: Federation):
    """The service renews it when it starts."""
    path = federation.aggregator / "aggregator.toml"
    path.write_text('listen = "127.0.0.1:8443"\nhosts = ["fed.example.org"]\n')
    assert "does not name fed.example.org" in examined(federation)["certificate"].found
    federation.clock.sleep(91 * DAY)
    assert "expired 1 days ago" in examined(federation)["certificate"].found


def test_folder_that_others_may_enter(federation: Federation):
    """It is named, with what to do."""
    federation.aggregator.chmod(0o750)
    found = examined(federation)["folder mode"]
    assert found.status == "problem"
    assert "(mode 0750)" in found.found
    assert "chmod 0700" in found.advice


@pytest.mark.parametrize("user", [0, 1000])
def test_service_of_root(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, user: int
):
    """Its nginx workers run as "nobody": other programs of that user read the key."""
    write(federation, f'listen = "{LOOPBACK}:{free_port()}"\n')
    monkeypatch.setattr(os, "geteuid", lambda: user)
    found = examined(federation)
    if user == 0:
        assert found["user"].status == "warning"
        assert "a user of its own" in found["user"].advice
    else:
        assert "user" not in found


@pytest.mark.parametrize(
    "name", ["ca.key", "control.secret", "superexec.secret", "sites.json"]
)
def test_file_that_is_missing_or_open(federation: Federation, name: str):
    """It is named."""
    federation.site("site-a")
    path = federation.aggregator / name
    if name == "sites.json":
        path.write_text("{")
    else:
        path.chmod(0o644)
    found = examined(federation)["authority"]
    assert found.status == "problem"
    assert name in found.found


def test_configuration_that_is_none(federation: Federation):
    """Nothing else is looked at."""
    write(federation, 'colour = "red"\n')
    assert list(examined(federation)) == ["aggregator"]
    assert "colour: unknown key" in examined(federation)["aggregator"].found


def test_damaged_run_is_told(federation: Federation):
    """With its file."""
    folder = federation.config.runs / "job" / "one"
    folder.mkdir(parents=True)
    (folder / "request.json").write_text("{")
    assert "request.json is damaged" in examined(federation)["run"].found


def exchanged(spec: ExchangeSpec, site: str | None) -> list[tuple[str, str]]:
    found = doctor_exchange.checks(spec, site=site, clock=SystemClock())
    return [(each.status, each.found) for each in found]


def test_exchange_is_written_and_read(tmp_path: Path):
    """The site fetches what the aggregator has left, and writes below its own name."""
    spec = ExchangeSpec(url=f"file://{tmp_path}/store")
    (_, takes), (status, gives) = exchanged(spec, "site-a")
    assert "MB/s" in takes
    assert status == "warning"
    assert "nothing to fetch yet" in gives
    assert all("MB/s" in text for _, text in exchanged(spec, None))
    assert all("MB/s" in text for _, text in exchanged(spec, "site-a"))
    left = [p for p in (tmp_path / "store").rglob("probe") if p.is_file()]
    names = {str(p.relative_to(tmp_path / "store")) for p in left}
    assert {"model/doctor/probe", "sites/site-a/doctor/probe"} <= names


def test_exchange_that_cannot_be_used(tmp_path: Path):
    """Here the place of its folder is taken by a file."""
    (tmp_path / "store").write_text("")
    spec = ExchangeSpec(url=f"file://{tmp_path}/store/below")
    ((status, found),) = exchanged(spec, "site-a")
    assert status == "problem"
    assert "store" in found
