"""Another user of the aggregator's host attacks the aggregator."""

import json
import os
import pwd
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.deployment import (
    SITES,
    Deployment,
    command_of,
    crossfed_here as crossfed,
    deployed,
    descendants,
    wait_for,
)
from support.forked import shared
from support.programs import needs

from cloud_adapters.flower import simulation as flower_simulation
from deploy.aggregator_host import host_secrets
from privacy import own_folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.flower,
    needs("root"),
    needs("nginx"),
]

ROOT = Path(__file__).resolve().parents[2]
POLICY = """
privacy = "none"
accept_two_sites = true
max_clip_norm = 100.0
total_epsilon = 1000.0
"""
PUBLIC = {"aggregator.toml", "ca.crt", "ca.crl", "server.crt", "roster.toml"}
USER = 54321
# Whose rights nginx's workers have, where root has started it.
NOBODY = pwd.getpwnam("nobody").pw_uid


@dataclass(frozen=True, kw_only=True)
class Attack:
    """What another user has tried, and what came of it.

    Attributes:
        host: The aggregator.
        token: Of the task that the coordinator works on.
        found: Of ``support.local_user``.
        found_by_nobody: Likewise, as the user of nginx's workers.
    """

    host: Deployment
    token: str
    found: dict[str, Any]
    found_by_nobody: dict[str, Any]

    @property
    def home(self) -> Path:
        """The aggregator's folder."""
        return self.host.folder / "aggregator"

    @property
    def family(self) -> set[int]:
        """The service, the agent of a site and all that they have started."""
        started = {process.pid for process in self.host.processes.values()}
        return started.union(*map(descendants, started))


@pytest.fixture(scope="module")
def attack() -> Iterator[Attack]:
    """An aggregator at work, whose coordinator waits for its sites."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # Others may come as far as the aggregator's own folder.
        with deployed(folder, POLICY, forked=False, started=False) as host:
            host.start_site(SITES[0])
            log = folder / f"{SITES[0]}.log"
            wait_for(lambda: "connected to" in log.read_text(), "a site connects")
            # Without differential privacy, whose library takes seconds to import.
            job = str(ROOT / "jobs" / "quickstart.toml")
            short = ("--set", "rounds=1", "--set", "training.local_steps=1")
            crossfed("run", job, "--detach", *short, "--aggregator", host.config)
            wait_for(lambda: _token(host) != "", "a coordinator works")
            token = _token(host)
            port = (folder / "aggregator" / "flower" / "port").read_text()
            found, others = (
                _attack(host, user, f"127.0.0.1:{port}", token)
                for user in (USER, NOBODY)
            )
            yield Attack(host=host, token=token, found=found, found_by_nobody=others)


def _token(host: Deployment) -> str:
    """The token of a task that a coordinator has begun."""
    state = host.folder / "aggregator" / "flower" / "state.db"
    with sqlite3.connect(f"file:{state}?mode=ro", uri=True) as database:
        rows = database.execute(
            "SELECT token FROM task WHERE token IS NOT NULL AND running_at != ''"
        ).fetchall()
    return str(rows[0][0]) if rows else ""


def _attack(host: Deployment, user: int, address: str, token: str) -> dict[str, Any]:
    authority = host.folder / "aggregator" / "ca.crt"
    attacker = shared().start(
        *(str(user), address, str(authority)),
        *(str(host.folder / name) for name in ("aggregator", *SITES)),
        call="support.local_user:main",
        out=host.folder / f"{user}.out",
        err=host.folder / f"{user}.err",
        environment={**os.environ, "TEST_TOKEN": token},
    )
    found, complaint = attacker.communicate(120)
    assert attacker.returncode == 0, complaint
    return dict(json.loads(found))


def test_no_call_is_answered(attack: Attack):
    """Neither without a secret nor with a guess or the token of a task."""
    calls = attack.found["calls"]
    assert attack.found_by_nobody["calls"] == calls
    assert {"StartRun with code", "ListRuns", "StopRun", "AcquireTask"} < calls.keys()
    assert {"PullTaskInput and a token", "PushMessages and a token"} < calls.keys()
    assert set(calls.values()) == {"HTTP 401"}, calls
    assert set(attack.found["pages"].values()) == {401}


def test_no_argument_of_a_process_is_a_secret(attack: Attack):
    """``ps`` shows arguments to every user."""
    flower_simulation.import_flower()
    from cloud_adapters.superlink import guard as flower_guard  # noqa: PLC0415

    commands = attack.found["commands"]
    seen = [commands[str(pid)] for pid in attack.family if str(pid) in commands]
    assert any("coordinator_process" in command for command in seen)
    control = host_secrets.read(attack.home / host_secrets.CONTROL)
    runtime = host_secrets.read(attack.home / host_secrets.RUNTIME)
    for secret in (
        attack.token,
        control.hex(),
        runtime.hex(),
        flower_guard.control_word(control),
        flower_guard.runtime_word(runtime),
    ):
        assert not [command for command in seen if secret in command]
    assert not [command for command in seen if "--token" in command]


def test_processes_show_their_arguments_alone(attack: Attack):
    """Neither environment nor memory nor files, to nginx's own user either."""
    assert any("nginx: worker" in command_of(pid) for pid in attack.family)
    for found in (attack.found, attack.found_by_nobody):
        opened = {int(path.split("/")[2]) for path in found["opened"]}
        assert not opened & attack.family, [command_of(pid) for pid in opened]


def _opened(folder: Path) -> set[str]:
    """Files and folders below one that others could reach if they might enter it."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if stat.S_IMODE(path.lstat().st_mode) & 0o077 and not path.is_symlink()
    }


def test_no_file_of_the_aggregator_is_readable(attack: Attack):
    """Its folder is closed, and what is in it is for its user alone, too."""
    assert attack.found["files"] == attack.found_by_nobody["files"] == []
    assert stat.S_IMODE(attack.home.stat().st_mode) == 0o700
    # Certificates, the roster and the configuration are no secrets.
    assert _opened(attack.home) <= PUBLIC
    names = {path.name for path in attack.home.rglob("*")}
    assert {"state.db", "job.toml", "request.json", "superlink.log", "ca.key"} <= names


def test_no_file_of_a_site_is_readable(attack: Attack):
    """Likewise keys, ledgers and what it keeps of runs."""
    site = attack.host.folder / SITES[0]
    assert stat.S_IMODE(site.stat().st_mode) == 0o700
    assert _opened(site) <= PUBLIC
    assert {"site.toml", "site.key"} & {path.name for path in site.rglob("*")}


def test_agent_listens_nowhere(attack: Attack):
    """Other users of a site's host find nothing to connect to."""
    agent = attack.host.processes[SITES[0]].pid
    own = {
        link.removeprefix("socket:[").removesuffix("]")
        for pid in (agent, *descendants(agent))
        for link in map(os.readlink, Path(f"/proc/{pid}/fd").iterdir())
        if link.startswith("socket:")
    }
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{agent}/net/{name}").read_text().splitlines()[1:]
    ]
    assert own
    assert not [row for row in rows if row[3] == "0A" and row[9] in own]


def test_run_of_processes_that_people_start_completes(attack: Attack):
    """The service, its programs and a site are no forks here, as they are elsewhere."""
    host = attack.host
    host.server = shared()
    host.start_site(SITES[1])
    followed = crossfed("watch", "quickstart", "--aggregator", host.config)
    assert "status      completed" in followed.stdout
    assert host.rounds("completed") == 1


def test_open_folder_is_closed(tmp_path: Path):
    """When the service starts, which says so."""
    said: list[str] = []
    folder = tmp_path / "aggregator"
    folder.mkdir()
    folder.chmod(0o755)
    own_folder.close(folder, said.append)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    own_folder.close(folder, said.append)
    assert said == [f"{folder} had mode 0755: it is now closed to other users"]
