"""Whether an aggregator can serve: what is said of what is wrong."""

import os
from pathlib import Path

import pytest
from support.enrolments import Federation

from cloud_adapters.local import memory_hardening
from cloud_adapters.net.ports import LOOPBACK, free_port
from cloud_adapters.nginx import config as proxy
from deploy.aggregator_host import enrolment_operator, host_secrets
from deploy.doctor import aggregator as doctor_aggregator
from deploy.doctor.checks import Check

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
    pytest.importorskip("flwr")
    federation.site("site-a")
    found = examined(federation)
    assert not problems(federation)
    assert found["sites"].found == "1 are enrolled"
    assert found["certificate"].found == "the server's certificate is valid for 90 days"
    assert "is free" in found["service"].found
    assert "refused" in found["exchange"].found


def test_program_of_an_alert_that_is_missing_is_named(federation: Federation):
    text = f'listen = "{LOOPBACK}:{free_port()}"\nproxy = false'
    write(federation, f'{text}\nalerts = [{{ command = ["page-nobody"] }}]\n')
    assert "page-nobody" in examined(federation)["alerts"].found


def test_older_book_is_a_problem(federation: Federation):
    """Until the service has started, which mends it."""
    federation.site("site-a")
    book = federation.aggregator / "sites.json"
    copy = book.read_bytes()
    federation.revoke("site-a")
    assert "sites" not in problems(federation)
    book.write_bytes(copy)
    assert "list site-a as revoked" in examined(federation)["sites"].found
    enrolment_operator.prepare(federation.config, clock=federation.clock)
    assert "sites" not in problems(federation)


def test_certificate_that_ended_or_lacks_a_host(federation: Federation):
    """The service renews it when it starts."""
    path = federation.aggregator / "aggregator.toml"
    path.write_text('listen = "127.0.0.1:8443"\nhosts = ["fed.example.org"]\n')
    assert "does not list fed.example.org" in examined(federation)["certificate"].found
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
def test_service_of_root_whose_memory_cannot_be_closed(
    federation: Federation,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    user: int,
):
    """Programs of "nobody" could read the key: the service refuses to start there."""
    pytest.importorskip("flwr")
    write(federation, f'listen = "{LOOPBACK}:{free_port()}"\n')
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert "user" not in examined(federation)
    # Where nginx is not installed, either.
    monkeypatch.setattr(proxy, "_PROGRAMS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "kernel" / "seccomp").mkdir(parents=True)
    (tmp_path / "kernel" / "seccomp" / "actions_avail").touch()
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "suid_dumpable").write_text("1\n")
    monkeypatch.setattr(memory_hardening, "KERNEL_SETTINGS", tmp_path)
    found = examined(federation)
    if user == 0:
        assert found["user"].status == "problem"
        assert "fs.suid_dumpable is 1" in found["user"].found
        assert "a separate user that" in found["user"].advice
        with pytest.raises(proxy.ProxyFailed, match="a separate user that"):
            proxy.prepare(
                proxy.ProxySettings(
                    listen="127.0.0.1:1",
                    superlink_port=2,
                    service_port=3,
                    folder=federation.aggregator,
                    work=tmp_path / "proxy",
                )
            )
    else:
        assert "user" not in found
