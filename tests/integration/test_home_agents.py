"""Two machines of one site in a run with differential privacy: only one spends."""

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from support import agents, homes
from support.agents import RUN_ID, AgentGrid, Consortium, consortium
from support.awkward_store import AwkwardStore
from support.deployment import wait_for
from support.enrolments import Federation
from support.forked import Forked, shared
from support.s3_server import S3Server
from support.small_jobs import small_job

from clients.home.folder_copy import FolderCopy
from clients.home.home import Home
from clients.home.lease import HomeLease, read_head
from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from deploy.aggregator_host.deployed_run import DeployedRun
from deploy.cli import commands as cli
from deploy.site_host import config as site_file
from deploy.site_host.agent import SiteAgent
from deploy.site_host.home import names_of
from deploy.site_host.home_spec import HomeSpec, open_home
from deploy.site_host.run import LedgerKey
from deploy.tools import ledger_recovery
from federation import events
from federation.clock import SystemClock
from federation.errors import HomeConflict
from federation.job.spec import JobSpec
from federation.job.storage_job import EncryptionSpec
from federation.protocols import ObjectStore
from monitoring.runs.run_folder import RunFolder
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.dp.ledger.ledger_format import Charge
from privacy.secagg.agreement import roster

pytestmark = pytest.mark.slow

SITES = ("site-0", "site-1", "site-2")
MOVED = SITES[0]
ROUNDS = 4
# Its state outlives a round, in a file that is written after training.
MOMENTUM = {"name": "sgd", "lr": 0.1, "momentum": 0.5, "state": "keep"}


def job_of(*, secure: bool) -> JobSpec:
    privacy: dict[str, Any] = {
        "differential_privacy": {
            "unit": "record",
            "target_epsilon": 8.0,
            "clip_norm": 1.0,
            "delta": 1e-3,
            "reserve_rounds": 4,
        }
    }
    tables: dict[str, Any] = {"schedule": {"minimum_sites": 2}}
    if secure:
        privacy["secure_aggregation"] = {"enabled": True, "clip_norm": 10.0}
        tables = {}
    return small_job(
        num_sites=len(SITES),
        rounds=ROUNDS,
        training={"local_steps": 1, "batch_size": 8, "optimizer": MOMENTUM},
        aggregation={"weights": "uniform"},
        privacy=privacy,
        **tables,
    )


@dataclass
class Machine:
    """A machine of the site: its agent, its folder, and its hold on the home."""

    agent: SiteAgent
    home: Home

    @property
    def run_folder(self) -> Path:
        return self.home.folder / "runs" / RUN_ID / "sites" / MOVED

    def charges(self) -> tuple[Charge, ...]:
        key = LedgerKey(self.agent.identity)
        return read_file(self.run_folder / LEDGER_NAME, key).charges

    def charged(self) -> list[int]:
        """The rounds whose training is charged."""
        return [c.round_index for c in self.charges() if c.purpose == "train"]

    def trained(self) -> list[int]:
        """The rounds whose work has been done here."""
        found = self.run_folder.glob("state-*")
        return sorted(int(path.name.partition("-")[2]) for path in found)

    def is_confirmed(self) -> bool:
        """Whether the home has all that the folder has."""
        head = self.home.lease.head
        return self.home.copy.gather(head.files, fence=head.fence) == head.files


@dataclass
class Place:
    """An aggregator, its sites, and the home of one of them."""

    folder: Path
    members: Consortium
    store: ObjectStore
    grid: AgentGrid = field(default_factory=lambda: AgentGrid({}))
    seen: list[events.Event] = field(default_factory=list)

    def machine(self, name: str) -> Machine:
        """Start the site on a machine that has its ``site.toml`` only."""
        config = agents.site_config(self.folder / name, MOVED)
        lease = HomeLease(
            self.store, SystemClock(), site=MOVED, node=name, seconds=60.0
        )
        copy = FolderCopy(
            folder=config.folder, store=self.store, names=names_of(config)
        )
        home = Home(copy, lease, identity="identity.pem", clock=SystemClock())
        key = LedgerKey(self.members.sites[MOVED])
        assert home.enter(wait=lambda _: True, head_key=lambda: key, take_over=True)
        agent = SiteAgent(
            config=replace(config, confirm=home.confirm),
            identity=self.members.sites[MOVED],
            roster=self.members.roster,
            clock=SystemClock(),
        )
        self.grid.agents[MOVED] = agent
        return Machine(agent, home)

    def run(self, job: JobSpec, listen: Callable[[events.Event], None]) -> None:
        folder = RunFolder(self.folder / "runs" / RUN_ID)
        folder.path.mkdir(parents=True)
        folder.write_job(job)
        coordinator = DeployedRun(
            folder,
            self.members.parties,
            clock=SystemClock(),
            listeners=[self.seen.append, listen],
            report=False,
        )
        with self.grid.connected():
            assert coordinator.run(self.grid.connect).status == "completed"

    def answers(self) -> list[int]:
        """The rounds whose update has left the site."""
        return [
            event.round_index
            for event in self.seen
            if isinstance(event, events.SiteAnswered) and event.site == MOVED
        ]

    def only(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.seen if isinstance(event, kind)]


def place_of(folder: Path, store: ObjectStore) -> Place:
    members = consortium(*SITES)
    made = Place(folder, members, store)
    for name in SITES[1:]:
        made.grid.agents[name] = agents.agent(folder, name, members)
    config = agents.site_config(folder / "first", MOVED)
    members.sites[MOVED].save(config.identity)
    return made


def begins(event: events.Event, index: int) -> bool:
    return isinstance(event, events.RoundStarted) and event.round_index == index


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_machine_that_is_paused_at_a_charge_does_not_spend(
    tmp_path: Path, *, secure: bool
):
    """Another takes over meanwhile. The charges are those of the answers, no more."""
    store = AwkwardStore(MemoryStore())
    place = place_of(tmp_path, store)
    machines = [place.machine("first")]

    def listen(event: events.Event) -> None:
        if begins(event, 2):
            store.meanwhile = lambda: machines.append(place.machine("second"))

    place.run(job_of(secure=secure), listen)
    first, second = machines
    with pytest.raises(HomeConflict, match="on second, fence 2"):
        first.agent.config.confirm()
    charged = second.charged()
    assert charged == place.answers()
    # The second has no keys of the run: it says so once, and gets new ones.
    lost = [2, 3] if secure else [2]
    assert charged == [index for index in (1, 2, 3, 4) if index not in lost]
    failed = [(e.round_index, e.site) for e in place.only(events.SiteFailed)]
    assert failed == [(index, MOVED) for index in lost]
    assert len(place.only(events.RunStarted)) == 1
    assert len(place.only(events.PrivacyPlanned)) == 1


def test_no_answer_leaves_before_the_home_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Neither its charge nor the state that the round left; tools find it there."""
    place = place_of(tmp_path, LocalStore(tmp_path / "home"))
    machine = place.machine("first")
    confirmed: list[bool] = []

    def listen(event: events.Event) -> None:
        if isinstance(event, events.SiteAnswered) and event.site == MOVED:
            confirmed.append(machine.is_confirmed())

    place.run(job_of(secure=False), listen)
    assert confirmed == [True] * ROUNDS
    assert machine.trained() == [1, 2, 3, 4]
    machine.home.release()
    home = {"url": f"file://{tmp_path}/home"}
    second, third = (
        agents.site_config(tmp_path / name, MOVED, home=home).folder / "site.toml"
        for name in ("second", "third")
    )
    roster.save(place.members.roster, second.with_name("roster.toml"))
    told: list[str] = []
    (found,) = ledger_recovery.at_site(
        second, RUN_ID, clock=SystemClock(), listener=told.append
    )
    assert found.before == found.after
    assert found.after.train == ROUNDS
    assert cli.main(["ledger", RUN_ID, "--config", str(third), "--json"]) == 0
    told_by_cli = capsys.readouterr()
    (facts,) = json.loads(told_by_cli.out)["ledgers"]
    assert facts["spent"]["train"]["charges"] == ROUNDS
    assert f"read from file://{tmp_path}/home" in told_by_cli.err
    assert [path.name for path in third.parent.iterdir()] == ["site.toml"]


def test_nothing_is_trained_while_the_home_is_away(tmp_path: Path):
    """The charge stays in the folder, and counts."""
    store = AwkwardStore(MemoryStore())
    place = place_of(tmp_path, store)
    machine = place.machine("first")

    def listen(event: events.Event) -> None:
        if isinstance(event, events.RoundStarted):
            store.is_away = event.round_index == 2

    place.run(job_of(secure=False), listen)
    assert machine.trained() == place.answers() == [1, 3, 4]
    assert machine.charged() == [1, 2, 3, 4]
    assert machine.is_confirmed()


@pytest.fixture
def encrypted(tmp_path: Path, s3_server: S3Server) -> ObjectStore:
    """A bucket whose objects are encrypted with a key that an operator holds."""
    key = tmp_path / "home.key"
    add_key(key)
    return EncryptedStore(s3_server.store("home"), KeyFile(key), prefix="home/site-0/")


def spent(folder: Path, store: ObjectStore, *, moves: bool) -> tuple[Place, Machine]:
    """Run a job; the machine of the site is lost between two rounds, or not."""
    folder.mkdir()
    place = place_of(folder, store)
    machines = [place.machine("first")]

    def listen(event: events.Event) -> None:
        if moves and begins(event, 3):
            machines.append(place.machine("second"))

    place.run(job_of(secure=False), listen)
    return place, machines[-1]


def test_epsilon_is_that_of_a_run_without_a_loss(
    tmp_path: Path, encrypted: ObjectStore
):
    """No round is repeated, and what the store holds shows nothing."""
    moved, second = spent(tmp_path / "moved", encrypted, moves=True)
    stayed, machine = spent(tmp_path / "stayed", MemoryStore(), moves=False)
    assert [c.epsilon_after for c in second.charges()] == [
        c.epsilon_after for c in machine.charges()
    ]
    assert moved.answers() == stayed.answers() == list(range(1, ROUNDS + 1))
    assert moved.only(events.SiteFailed) == []
    assert isinstance(encrypted, EncryptedStore)
    for info in encrypted.store.list():
        content = encrypted.store.read(info.key)
        assert b"PRIVATE KEY" not in content
        assert b"epsilon" not in content
        assert MOVED.encode() not in content


def test_a_home_in_a_bucket(tmp_path: Path, bucket: dict[str, str]):
    """As ``site.toml`` names it: a second machine takes over, the first fails."""
    key = tmp_path / "home.key"
    add_key(key)
    spec = HomeSpec(
        **bucket, encryption=EncryptionSpec(key=f"file:{key}"), lease_seconds=60.0
    )
    with contextlib.ExitStack() as stack:
        stores = [
            stack.enter_context(contextlib.closing(open_home(spec, MOVED)))
            for _ in range(2)
        ]
        one = homes.first(tmp_path / "one", stores[0])
        assert one.enter()
        one.charge(1)
        two = homes.Machine(tmp_path / "two", stores[1])
        assert two.enter(take_over=True)
        one.clock.sleep(1.0)
        with pytest.raises(HomeConflict, match="on two, fence 2"):
            one.charge(2)
        two.charge(2)
        assert two.rounds() == [1, 2]
        two.home.release()
        back = homes.Machine(one.folder, stores[0])
        assert back.enter()
        assert back.rounds() == [1, 2, 0]


def start(folder: Path) -> Forked:
    """Run ``crossfed site up`` as a process; its aggregator is unreachable."""
    log = folder.with_suffix(".log")
    words = ("site", "up", "--config", str(folder / "site.toml"))
    return shared().start(*words, out=log, err=log, environment=os.environ)


def test_a_frozen_process_ends_when_another_has_taken_over(tmp_path: Path):
    """Both are alive, and one of them is the site; who is left releases the home."""
    site = Federation(folder=tmp_path).site("site-a")
    key = tmp_path / "home.key"
    add_key(key)
    with (site.folder / "site.toml").open("a") as file:
        file.write(
            f'\n[home]\nurl = "file://{tmp_path}/home"\nlease_seconds = 1\n'
            f'encryption = {{ key = "file:{key}" }}\n'
        )
    second = tmp_path / "second"
    second.mkdir(mode=0o700)
    shutil.copy(site.folder / "site.toml", second)

    def log_of(folder: Path) -> str:
        return folder.with_suffix(".log").read_text()

    def holds(folder: Path) -> None:
        wait_for(lambda: "holds the home" in log_of(folder), "it holds the home", 60)

    frozen = start(site.folder)
    holds(site.folder)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        heir = start(second)
        holds(second)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert frozen.wait(30) == 1
    assert "another process holds" in log_of(site.folder)
    kept = "identity.pem"
    assert (second / kept).read_bytes() == (site.folder / kept).read_bytes()
    heir.send_signal(signal.SIGTERM)
    assert heir.wait(30) == 0
    spec = site_file.load(second / "site.toml").file.home
    with contextlib.closing(open_home(spec, "site-a")) as store:
        found = read_head(store)
    assert found is not None
    assert (found[0].fence, found[0].released) == (2, True)
