"""``[home]`` of ``site.toml``, and the tools that know of it."""

import json
import shutil
import threading
from pathlib import Path

import pytest
from support.enrolments import Federation

from cloud_adapters.keys.key_file import add_key
from deploy.cli import commands as cli
from deploy.doctor import home as doctor_home
from deploy.site_host import config as site_file
from deploy.site_host.config import SiteConfig
from deploy.site_host.departure import Departure
from deploy.site_host.home import entered, names_of, newest
from federation.clock import SystemClock
from federation.errors import HomeConflict, JobError
from federation.messages import LeaveReason

CLOCK = SystemClock()


def site_with(tmp_path: Path, home: str) -> Path:
    """An enrolled site's ``site.toml`` with a table of its home."""
    path = Federation(folder=tmp_path).site("site-a").folder / "site.toml"
    with path.open("a") as file:
        file.write(f"\n[home]\n{home}\n")
    return path


def local_site(tmp_path: Path) -> SiteConfig:
    key = tmp_path / "home.key"
    add_key(key)
    home = f'url = "file://{tmp_path}/home"\nencryption = {{ key = "file:{key}" }}'
    home += "\nlease_seconds = 2"
    return site_file.load(site_with(tmp_path, home))


def second_machine(config: SiteConfig, tmp_path: Path) -> SiteConfig:
    folder = tmp_path / "second"
    folder.mkdir(mode=0o700)
    shutil.copy(config.folder / "site.toml", folder)
    return site_file.load(folder / "site.toml")


def test_a_bucket_needs_encryption(tmp_path: Path):
    with pytest.raises(JobError, match=r"home\.encryption: .* private keys unencr"):
        site_file.load(site_with(tmp_path, 'url = "s3://bucket/home"'))


@pytest.mark.parametrize("url", ["file://relative", "memory://", "ftp://x", "home"])
def test_a_home_outlives_the_machine(tmp_path: Path, url: str):
    with pytest.raises(JobError, match=r"site\.toml: home\.url: "):
        site_file.load(site_with(tmp_path, f'url = "{url}"'))


def test_keys_outside_of_the_folder_are_not_kept(tmp_path: Path):
    """Of the identity that is an error; other files may come with the machine."""
    path = site_with(tmp_path, f'url = "file://{tmp_path}/home"')
    text = path.read_text()
    path.write_text(f'identity = "/etc/identity.pem"\n{text}')
    with pytest.raises(JobError, match="of the site's folder"):
        site_file.load(path)
    path.write_text(text.replace('authority = "ca.crt"', 'authority = "/etc/ca.crt"'))
    assert names_of(site_file.load(path)) == (
        "identity.pem",
        "node.pem",
        "site.pem",
        "roster.toml",
        "audit.jsonl",
    )


def test_the_home_is_entered_and_released(tmp_path: Path):
    """A second machine need not wait; the first cannot confirm any more."""
    first = local_site(tmp_path)
    told: list[str] = []
    departure = Departure()
    with entered(first, departure=departure, clock=CLOCK, listener=told.append) as held:
        assert held is not None
        held.confirm()
        assert not departure.is_replaced()
    with pytest.raises(HomeConflict, match="left the site's home"):
        held.confirm()
    assert departure.is_replaced()  # It says no farewell that would be another's.
    second = second_machine(first, tmp_path)
    with entered(
        second, departure=Departure(), clock=CLOCK, listener=told.append
    ) as held:
        assert held is not None
        assert second.identity.read_bytes() == first.identity.read_bytes()
        # The first must not be the site again while this one is.
        departure.stopped.set()
        with entered(
            first, departure=departure, clock=CLOCK, listener=told.append
        ) as none:
            assert none is None
    assert [text.split(":")[0] for text in told] == [
        "this machine holds the home of the site",
        "this machine holds the home of the site",
        told[2].split(":")[0],
    ]
    assert told[2].startswith("this site runs on ")


@pytest.mark.slow
def test_the_home_is_held_until_the_state_of_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The next machine would begin without it."""
    monkeypatch.setattr("deploy.site_host.home._FAREWELL_SECONDS", 0.0)
    config, departure = local_site(tmp_path), Departure()
    with entered(config, departure=departure, clock=CLOCK, listener=print) as held:
        assert held is not None
        (renewal,) = (t for t in threading.enumerate() if t.name == "home")
        with departure.writing():
            departure.now(LeaveReason.SIGTERM)
            renewal.join(1.0)
            held.confirm()
        renewal.join(60)
        with pytest.raises(HomeConflict, match="left the site's home"):
            held.confirm()


@pytest.mark.slow
def test_a_lost_home_ends_the_process_with_an_error(tmp_path: Path):
    first = local_site(tmp_path)
    second = second_machine(first, tmp_path)
    departure = Departure()

    def be_replaced() -> None:
        with (
            entered(first, departure=departure, clock=CLOCK, listener=print),
            entered(
                second,
                departure=Departure(),
                clock=CLOCK,
                listener=print,
                take_over=True,
            ),
        ):
            assert departure.stopped.wait(60)

    with pytest.raises(HomeConflict, match="another process holds"):
        be_replaced()
    assert departure.at_once() is not None


def test_tools_read_the_newest_copy(tmp_path: Path):
    """That of the home, if another machine has written it."""
    first = local_site(tmp_path)
    assert not doctor_home.is_elsewhere(first)
    told: list[str] = []
    with newest(first, told.append) as config:
        assert config.folder == first.folder
    with entered(first, departure=Departure(), clock=CLOCK, listener=print):
        pass
    with newest(first, told.append) as config:
        assert config.folder == first.folder
    second = second_machine(first, tmp_path)
    assert doctor_home.is_elsewhere(second)
    assert told == []
    with newest(second, told.append) as config:
        assert config.folder not in {first.folder, second.folder}
        assert config.identity.read_bytes() == first.identity.read_bytes()
    assert not config.folder.exists()
    assert told[0].startswith(f"read from file://{tmp_path}/home, which ")


@pytest.mark.slow
def test_doctor_says_who_holds_the_home(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    first = local_site(tmp_path)
    (check,) = doctor_home.checks(first)
    assert check.found.endswith("empty until the agent is started")
    told: list[str] = []
    with entered(first, departure=Departure(), clock=CLOCK, listener=told.append):
        (check,) = doctor_home.checks(first)
        assert "it is held by " in check.found
    second = second_machine(first, tmp_path)
    cli.main(["doctor", "--site", str(second.folder / "site.toml"), "--json"])
    checks = {c["name"]: c for c in json.loads(capsys.readouterr().out)["checks"]}
    assert "was last held by " in checks["home"]["found"]
    assert checks["identity"]["found"].startswith("in the home: crossfed site up")
    assert "node key" not in checks
    (tmp_path / "home.key").unlink()
    (check,) = doctor_home.checks(second)
    assert check.status == "problem"
