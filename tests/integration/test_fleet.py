"""A whole federation from one file: up, looked at, killed in the middle, down."""

import json
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.deployment import CLOCK, SITES, crossfed, crossfed_here, wait_for
from support.forked import shared
from support.programs import needs

from deploy.cli.commands import main
from federation.job import code_files

JOBS = Path(__file__).parents[2] / "jobs"
ROLES = ["aggregator", *(f"site-{site}" for site in SITES)]
POLICY = """
privacy = "none"
secure_aggregation = false
functions = ["./model.py:net", "clients.data:*"]
"""
# A user's own, beside the job: nobody copies it.
MODEL = """
import time

from torch import nn


class Pause(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, inputs):
        time.sleep(self.seconds)
        return inputs


def net(seconds=0.0):
    return nn.Sequential(Pause(seconds), nn.Flatten(), nn.Linear(64, 10))
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("fleet"),
    needs("nginx"),
]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[Path]:
    """A deployment of two local sites; nothing of it is left running."""
    yield from deployment_file(tmp_path)


@pytest.fixture(scope="module")
def shared_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One for several tests: what comes up in the first of them, the others change."""
    yield from deployment_file(tmp_path_factory.mktemp("running"))


@pytest.fixture
def running(shared_file: Path) -> Path:
    """One that is up."""
    if not alive(shared_file):
        crossfed("up", str(shared_file), "--detach")
    return shared_file


def deployment_file(tmp_path: Path) -> Iterator[Path]:
    path = written(tmp_path)
    yield path
    crossfed_here("down", str(path))
    assert alive(path) == []


def written(tmp_path: Path) -> Path:
    """The files of a deployment of which nothing has been started."""
    text = (JOBS / "quickstart.toml").read_text()
    head, _, tail = text.partition("[privacy.secure_aggregation]")
    head = head.replace("rounds = 30", "rounds = 1")
    head = head.replace("clients.models:digits_cnn", "./model.py:net")
    assert "rounds = 1" in head
    assert "./model.py:net" in head
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "job.toml").write_text(head + tail[tail.index("[[sites]]") :])
    path = tmp_path / "fed.toml"
    path.write_text('name = "fed"\njob = "job.toml"\n' + "".join(map(table, SITES)))
    return path


def change_job(file: Path, old: str, new: str) -> None:
    """Change a key of the deployment's job."""
    job = file.parent / "job.toml"
    text = job.read_text()
    assert old in text
    job.write_text(text.replace(old, new))


def table(site: str) -> str:
    return f'[[sites]]\nname = "{site}"\n[sites.policy]{POLICY}'


def nodes(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(
        crossfed_here("nodes", str(path), "--json", "--all").stdout
    )
    return found


def alive(path: Path) -> list[str]:
    return sorted(node["node"] for node in nodes(path) if node["state"] != "gone")


def test_a_federation_comes_up_runs_and_goes_down(shared_file: Path):
    """And comes up again with the same keys, where one of its nodes has died."""
    file = shared_file
    change_job(file, "rounds = 1", "rounds = 2")  # One tells `plan` no speeds.
    up = crossfed("up", str(file), "--json")
    result = json.loads(up.stdout)
    assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    found = sorted((node["node"], node["state"]) for node in nodes(file))
    assert found == [(role, "running") for role in sorted(ROLES)]

    check_predicted(file, result)

    again = crossfed("up", str(file), "--detach")
    assert again.stdout.strip() == result["run_id"]
    assert "is completed" in again.stderr
    assert "launched" not in again.stderr

    folder = file.parent / "deployments" / "fed"
    identity = (folder / "sites" / SITES[0] / "identity.pem").read_bytes()
    down = json.loads(crossfed_here("down", str(file), "--json").stdout)
    assert down["ended"] == 3
    assert alive(file) == []
    places = [Path(each["place"]) for each in down["left"]]
    assert folder / "aggregator" / "runs" in places
    assert folder / "sites" / SITES[0] in places
    assert all(place.exists() for place in places)

    crossfed("up", str(file), "--detach")
    assert alive(file) == sorted(ROLES)
    assert (folder / "sites" / SITES[0] / "identity.pem").read_bytes() == identity
    (site,) = [
        node
        for node in nodes(file)
        if node["node"] == ROLES[1] and node["state"] != "gone"
    ]
    started = json.loads((folder / "nodes" / site["id"] / "started.json").read_text())
    os.kill(started["pid"], signal.SIGKILL)
    wait_for(lambda: ROLES[1] not in alive(file), "the node is gone", 60)
    relaunched = crossfed("up", str(file), "--detach")
    assert relaunched.stderr.count("launched") == 1
    assert alive(file) == sorted(ROLES)


def check_predicted(file: Path, result: dict[str, Any]) -> None:
    """The plan like a run and the one kept beside it agree with what it sent."""
    like = ("--like", result["run_id"])
    shown = json.loads(crossfed_here("plan", str(file), "--json", *like).stdout)
    planned, *others = shown["alternatives"]
    # A header is padded to 64 bytes, and a deployed one may need one step more.
    slack = 64 * 6
    for way in ("bytes_down", "bytes_up"):
        low, high = planned[way]
        assert low - slack <= result[way] <= high + slack
    assert planned["seconds"] > 0
    assert others
    runs = file.parent / "deployments" / "fed" / "aggregator" / "runs"
    (run,) = runs.glob(f"*/{result['run_id']}")
    shown = json.loads(crossfed_here("report", str(run), "--json").stdout)
    assert "Predicted and actual" in Path(shown["report"]).read_text()
    (compared,) = shown["plans"]
    assert len(compared["rows"]) == 6
    for row in compared["rows"]:
        assert row["unit"] == "bytes"
        low, high = row["predicted"]
        assert low - slack <= row["actual"] <= high + slack


def test_changed_settings_replace_the_node_that_reads_them(running: Path):
    """That one alone: the others do not notice."""
    file = running
    before = {n["node"]: n["id"] for n in nodes(file) if n["state"] != "gone"}
    text = file.read_text()
    at = text.rindex("secure_aggregation")
    file.write_text(f"{text[:at]}max_rounds = 100\n{text[at:]}")
    told = crossfed("up", str(file), "--detach").stderr
    assert f"{ROLES[2]}: its settings have changed" in told
    after = {n["node"]: n["id"] for n in nodes(file) if n["state"] != "gone"}
    assert {role for role in ROLES if before[role] != after[role]} == {ROLES[2]}


# Each command that is killed takes as much as what it has started.
_FEW, _ALL = ("up", "down", "up"), ("up", "up", "down", "up")
_MANY = [pytest.param(seed, _ALL, marks=pytest.mark.long) for seed in range(2, 7)]


@pytest.mark.parametrize(("seed", "verbs"), [(1, _FEW), *_MANY])
def test_commands_that_are_killed_leave_nothing_twice(
    file: Path, seed: int, verbs: Sequence[str]
):
    """At any moment: the next one continues, and at last one node fills each role."""
    moments = random.Random(seed)  # noqa: S311 -- when to kill a test's process
    for verb in verbs:
        seconds = moments.uniform(0.1, 6.0 if verb == "up" else 1.0)
        kill_after(seconds, verb, str(file), *(["--detach"] * (verb == "up")))
    crossfed("up", str(file), "--detach")
    assert alive(file) == sorted(ROLES)
    crossfed_here("down", str(file))
    assert alive(file) == []


def kill_after(seconds: float, *arguments: str) -> None:
    """Kill a command as the kernel would, unless it has ended before."""
    nowhere = Path(os.devnull)
    process = shared().start(
        *arguments, out=nowhere, err=nowhere, environment=os.environ
    )
    CLOCK.sleep(seconds)
    process.kill()
    process.wait(60)


def test_changed_keys_of_the_aggregator_replace_it(running: Path):
    """It reads them when it starts, and sites know where it was."""
    config = running.parent / "deployments" / "fed" / "aggregator" / "aggregator.toml"
    before = config.read_text()
    with running.open("a") as file:
        file.write("[aggregator]\nconnect_seconds = 99.0\n")
    told = crossfed("up", str(running), "--detach").stderr
    assert "aggregator: its settings have changed" in told
    assert told.count("launched") == 1
    text = config.read_text()
    assert "connect_seconds = 99.0" in text
    assert text.replace("99.0", "600.0") == before


_NET = 'factory = "./model.py:net"'


@pytest.mark.long
def test_changed_hours_hold_for_nodes_that_run(running: Path):
    """They are what a forgotten federation may cost. A watcher is told when it ends."""
    whole = running.read_text()
    running.write_text(whole.replace("[[sites]]", "max_hours = 0.006\n[[sites]]", 1))
    job = running.parent / "job.toml"
    longer = job.read_text()
    assert longer.count(_NET) == 1
    job.write_text(longer.replace(_NET, f"{_NET}\noptions = {{ seconds = 5.0 }}"))
    told = crossfed("up", str(running), "--older", "keep", code=1).stderr
    assert told.count("its settings have changed") == len(ROLES)
    # Under load, sites may have ended before the aggregator is seen to have.
    assert " ended (its 21.6 s" in told
    wait_for(lambda: alive(running) == [], "all have ended", 60)
    job.write_text(longer)
    running.write_text(whole)
    told = crossfed("up", str(running), "--detach", code=2).stderr
    assert "crossfed: --older: run " in told
    assert alive(running) == []
    crossfed("up", str(running), "--detach", "--older", "stop")
    assert alive(running) == sorted(ROLES)


@pytest.fixture
def refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path, int], str]]:
    """What ``up`` says, in this process, when it ends with a code before any start."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # ``main`` appends the folder.
    monkeypatch.setenv(code_files.FOLDERS, ".")

    def give(file: Path, code: int) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Those of libraries, as for a user.
            assert main(["up", str(file)]) == code
        return capsys.readouterr().err

    yield give
    if [*tmp_path.glob("deployments/*/nodes/*")]:  # It was not refused.
        crossfed_here("down", str(tmp_path / "fed.toml"))


def test_folder_of_another_user_is_refused(
    tmp_path: Path, refusal: Callable[[Path, int], str]
):
    """What they have prepared in it would run as this user."""
    file = written(tmp_path)
    folder = tmp_path / "deployments" / "fed"
    folder.mkdir(parents=True)
    for mode in (0o777, 0o720):
        folder.chmod(mode)
        assert f"users may write to {folder}" in refusal(file, 1)
    assert not [*folder.iterdir()]


def test_another_folder_may_not_take_over(running: Path):
    """Its nodes would be a second federation of the same name."""
    file = running
    folder = file.parent / "deployments" / "fed"
    record = folder / "deployment.json"
    whole = record.read_text()
    record.write_text(whole.replace(json.loads(whole)["owner"], "0" * 16))
    for verb in ("up", "down"):
        told = crossfed_here(verb, str(file), code=1).stderr
        assert "was brought up from" in told
        assert "aggregator (aggregator-" in told
    assert alive(file) == sorted(ROLES)
    record.write_text(whole)


def test_job_that_no_deployed_run_can_have_starts_nothing(
    tmp_path: Path, refusal: Callable[[Path, int], str]
):
    """Nobody is left running who only waits for a better one."""
    file, job = written(tmp_path), tmp_path / "job.toml"
    whole = job.read_text()
    secure = "[privacy.secure_aggregation]\nenabled = true\ntwo_sites_waiver = true\n"
    fault = f'[[simulation.faults]]\nsite = "{SITES[0]}"\nkind = "silent"\n'
    for more, key in ((secure, "max_examples"), (fault, "simulation.faults")):
        job.write_text(whole + more)
        told = refusal(file, 2)
        assert f"{job}: " in told
        assert key in told
    assert not (tmp_path / "deployments").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "fed"', 'name = "Fed"', "fed.toml: name: must be 1 to 40"),
        ('job = "job.toml"', 'job = "no.toml"', "no.toml"),
        (f'name = "{SITES[0]}"', 'name = "mars"', "sites[0].name: "),
        (f'name = "{SITES[0]}"', f'name = "{SITES[1]}"', "names 'gcp-us-central1'"),
        ("privacy =", "privcy =", "privcy"),
        ('privacy = "none"', 'privacy = "much"', "sites[0].policy.privacy"),
        ("[sites.policy]", "[sites.policy]\nring_bits = [17]", "policy.ring_bits"),
        ('job = "job.toml"', 'job = ""', "fed.toml: job: "),
        (
            "[sites.policy]",
            '[sites.machine]\nregion = "us-east-1"\n[sites.policy]',
            "sites[0].machine: has keys for",
        ),
    ],
)
def test_mistakes_are_named_before_anything_starts(
    tmp_path: Path,
    refusal: Callable[[Path, int], str],
    old: str,
    new: str,
    message: str,
):
    """With the key; no folder is made."""
    path = written(tmp_path)
    path.write_text(path.read_text().replace(old, new, 1))
    assert message in refusal(path, 2)
    assert not (tmp_path / "deployments").exists()


def test_a_faulty_price_table_keeps_no_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """They cost money while someone looks for the fault."""
    path = written(tmp_path)
    path.write_text(f'prices = "mine.toml"\n{path.read_text()}')
    (path.parent / "mine.toml").write_text("as_of = 3\n")
    assert main(["down", str(path)]) == 0
    said = capsys.readouterr()
    assert "mine.toml" in said.err
    assert "prices of this release" in said.err
    assert "has no running node" in said.out


def test_a_site_that_is_removed_from_the_file_is_ended(running: Path):
    """It would run, and cost, unseen."""
    whole = running.read_text()
    running.write_text(whole[: whole.rindex("[[sites]]")])
    told = crossfed("up", str(running), "--detach").stderr
    assert f"{ROLES[2]}: no longer in" in told
    wait_for(lambda: alive(running) == sorted(ROLES[:2]), "it ends", 60)
    running.write_text(whole)


def test_nodes_of_a_lost_folder_can_be_ended(running: Path):
    """By their labels: whoever owns them. The last test of what is running."""
    file = running
    record = file.parent / "deployments" / "fed" / "deployment.json"
    record.unlink()
    told = crossfed("up", str(file), code=1).stderr
    assert "crossfed down --any-owner" in told
    crossfed_here("down", str(file), "--any-owner")
    assert alive(file) == []
