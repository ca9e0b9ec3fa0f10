"""What keeps a machine from taking part."""

import os
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from support.secagg_parties import Parties, entropy

from deploy.doctor import checks as doctor
from deploy.doctor.checks import Check
from federation.clock import SystemClock, VirtualClock
from privacy.secagg.agreement import identity, roster

NOW = 1_800_000_000.0
KEY = identity.generate(entropy("key"))


def states(checks: list[Check]) -> list[str]:
    return [check.status for check in checks]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "left.pem"
    KEY.save(path)
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """An encrypted key file."""
    path = tmp_path / "secret.pem"
    KEY.save(path, passphrase=b"correct horse")
    return path


def test_missing_and_old_packages_are_problems():
    """Each with the command that mends it."""
    texts = ["numpy>=1.0", "scipy==0.6.*", "no-such-package", 'mlx; extra == "x"']
    wanted = [Requirement(text) for text in texts]
    checks = {c.found: c for c in doctor.check_packages(wanted)}
    assert "mlx" not in {c.name for c in checks.values()}
    old = next(c for c in checks.values() if c.name == "scipy")
    assert old.status == "problem"
    assert "is not ==0.6.*" in old.found
    assert "install 'scipy==0.6.*'" in old.advice
    missing = checks["it is not installed"]
    assert missing.status == "problem"
    assert missing.advice.endswith("'no-such-package'")


def test_encrypted_key_of_mode_0600_is_well(secret: Path):
    """Its public half stays unknown."""
    checks, public = doctor.check_key(secret)
    assert (states(checks), public) == (["ok"], None)


def test_unencrypted_key_is_a_warning(key: Path):
    """It can be compared with the roster."""
    checks, public = doctor.check_key(key)
    assert states(checks) == ["warning"]
    assert "not encrypted" in checks[0].found
    assert public == KEY.public


@pytest.mark.parametrize("mode", [0o400, 0o640, 0o604, 0o700, 0o666])
def test_any_other_mode_is_a_warning(secret: Path, mode: int):
    """With the mode and the command."""
    secret.chmod(mode)
    checks, _ = doctor.check_key(secret)
    assert states(checks) == ["warning", "ok"]
    assert f"{mode:04o}" in checks[0].found
    assert "chmod 600" in checks[0].advice


def test_foreign_owner_is_a_warning(key: Path, monkeypatch: pytest.MonkeyPatch):
    """And the key is not loaded."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    checks, public = doctor.check_key(key)
    assert states(checks) == ["warning", "warning"]
    assert "belongs to user" in checks[0].found
    assert public is None


def test_what_is_no_key_file_is_a_problem(tmp_path: Path, key: Path):
    """Missing, a link, a pipe, a text, a damaged key."""
    link, pipe, text = (tmp_path / name for name in ("link", "pipe", "text"))
    whole = tmp_path / "whole"
    KEY.save(whole)
    link.symlink_to(whole)
    os.mkfifo(pipe)
    text.write_text("hello")
    text.chmod(0o600)
    key.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n")
    for path in (tmp_path / "none", link, pipe, text, key):
        checks, public = doctor.check_key(path)
        assert checks[-1].status == "problem"
        assert str(path) in checks[-1].found
        assert "--key" in checks[-1].advice
        assert public is None


def test_sound_roster_shows_serial_and_digest(tmp_path: Path):
    """That is what people compare."""
    path = tmp_path / "roster.toml"
    known = Parties(3).roster
    roster.save(known, path)
    path.chmod(0o644)
    checks, found = doctor.check_roster(path)
    assert (states(checks), found) == (["ok"], known)
    assert known.digest.hex() in checks[0].found


def test_roster_that_others_may_write_is_a_warning(tmp_path: Path):
    """And so is one with a single site."""
    path = tmp_path / "roster.toml"
    roster.save(Parties(1).roster, path)
    path.chmod(0o666)
    checks, _ = doctor.check_roster(path)
    assert states(checks) == ["ok", "warning", "warning"]


def test_bad_roster_is_a_problem(tmp_path: Path):
    """The line names the file, whatever is wrong with it."""
    path = tmp_path / "roster.toml"
    missing, _ = doctor.check_roster(path)
    path.write_text("serial = 1")
    draft, found = doctor.check_roster(path)
    assert (states(missing), states(draft), found) == (["problem"], ["problem"], None)
    assert all(str(path) in check.found for check in (*missing, *draft))


def test_key_is_looked_up_in_the_roster(tmp_path: Path, key: Path):
    """The aggregator's, a site's, or nobody's."""
    parties = Parties(2)
    known = parties.roster
    for public, status, word in (
        (known.aggregator_key, "ok", "aggregator"),
        (known.sites[1].public_key, "ok", str(known.sites[1].site)),
        (KEY.public.key, "problem", "does not pin"),
    ):
        check = doctor.check_pinned(identity.PublicIdentity(public), known)
        assert check.status == status
        assert word in check.found
    path = tmp_path / "roster.toml"
    roster.save(known, path)
    checks = doctor.examine(
        key=key, roster_file=path, runs=tmp_path, clock=SystemClock()
    )
    assert [c.status for c in checks if c.name == "trust"] == ["problem"]


@pytest.mark.parametrize(
    ("now", "status"),
    [
        (NOW, "ok"),
        (NOW - 30, "ok"),
        (NOW - 3600, "warning"),
        (0.0, "problem"),
        (5e9, "problem"),
    ],
)
def test_clock_must_be_possible(tmp_path: Path, now: float, status: str):
    """Neither before files were written nor in another century."""
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (NOW, NOW))
    check = doctor.check_clock(VirtualClock(now), [path, tmp_path / "none"])
    assert check.status == status
