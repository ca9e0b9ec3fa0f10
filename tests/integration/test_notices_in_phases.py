"""A site that has to leave costs the others nothing, whatever it is at.

Six phases, three kinds of notice: a spot machine of EC2, one of Compute Engine, and
SIGTERM. One federation of seven sites with secure aggregation, of which
five suffice, lives through all of them.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from support import fake_metadata, phase_gate
from support.deployment import CLOCK, Deployment, crossfed, deployed, wait_for
from support.fake_imds import FakeImds
from support.phase_gate import (
    DOWNLOAD,
    HANDSHAKE,
    PHASES,
    TRAINING,
    UNMASKING,
    UPLOAD,
)
from support.programs import needs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.flower,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("notices"),
    needs("nginx"),
]

SITES = tuple(f"site-{number}" for number in range(7))
LEAVES, DROPS = SITES[0], SITES[-1]
POLICY = """
privacy = "none"
max_clip_norm = 100.0
min_group = 1
functions = ["support.phase_gate:gated_network", "clients.data:*"]
"""
LOCAL_STEPS = 5
JOB = f"""
name = "phases"
rounds = 10000
evaluation = {{ every = 0 }}
training = {{ local_steps = {LOCAL_STEPS}, optimizer = {{ lr = 0.1 }} }}
schedule = {{ round_deadline_seconds = 300 }}
data = {{ source = "clients.data:digits" }}
sites = [{", ".join(f'{{ name = "{site}" }}' for site in SITES)}]
[model]
factory = "support.phase_gate:gated_network"
options = {{ inputs = 64, classes = 10 }}
[privacy.secure_aggregation]
enabled = true
threshold = 5
clip_norm = 10.0
max_examples = 2000
"""
EC2, GCE, SIGTERM = "aws", "gcp", "sigterm"
ENDED = {"completed", "failed", "stopped"}
# What a notice may cost a site.
MOST_SECONDS = 30.0
CELLS = [(kind, phase) for phase in PHASES for kind in (EC2, GCE, SIGTERM)]


class Cloud:
    """Metadata services of two clouds, which a test has give notice."""

    def __init__(self, stack: ExitStack) -> None:
        self._is_preempted = False
        self._imds = stack.enter_context(FakeImds())
        self._gce = stack.enter_context(
            fake_metadata.metadata(lambda: self._is_preempted)
        )

    def environment(self) -> Mapping[str, str]:
        host = self._gce.url.removeprefix("http://")
        return {
            "AWS_EC2_METADATA_SERVICE_ENDPOINT": self._imds.url,
            "GCE_METADATA_HOST": host,
        }

    def stay(self) -> None:
        self._is_preempted, self._imds.action = False, None

    def give_notice(self, kind: str) -> None:
        self._is_preempted = kind == GCE
        if kind == EC2:
            self._imds.action = {"action": "terminate", "time": "2999-01-01T00:00:00Z"}


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    with ExitStack() as stack:
        yield Cloud(stack)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("phases")
    environment = {"PYTHONPATH": str(Path(__file__).parents[1])}
    with deployed(folder, POLICY, sites=SITES, environment=environment) as made:
        (folder / "phases.toml").write_text(JOB)
        yield made


def started(made: Deployment, site: str, **environment: str) -> None:
    """Start a site's agent, and wait until it is connected."""
    log = made.folder / f"{site}.log"
    before = log.read_text().count("connected to")
    made.start_site(site, **environment)
    wait_for(lambda: log.read_text().count("connected to") > before, "it connects", 60)


def finished(made: Deployment) -> list[dict[str, Any]]:
    return [each for each in made.events() if each["event"] == "RoundFinished"]


def begun(made: Deployment) -> int:
    return len([e for e in made.events() if e["event"] == "RoundStarted"])


def train(made: Deployment, *sites: str) -> None:
    """Wait for a round that begins from now on, to which these sites have answered."""
    earlier = begun(made)

    def is_whole() -> bool:
        late = [each for each in finished(made) if each["round_index"] > earlier]
        return any({*sites} <= {*each["answered"]} for each in late)

    wait_for(is_whole, f"a round with {sites}", 240)


def begin(made: Deployment, *, is_awaited: bool = True) -> None:
    """Begin a run, after the end of the last one."""
    at = ("--aggregator", made.config)
    for row in json.loads(crossfed("ps", *at, "--json").stdout):
        if row["status"] not in ENDED:
            crossfed("stop", row["run"], *at)
    earlier = made.num_runs()
    follower = made.run(made.folder / "phases.toml")

    def has_begun() -> bool:
        assert follower.poll() is None, follower.communicate()
        return made.num_runs() > earlier

    if is_awaited:
        wait_for(has_begun, "it begins", 60)


def settle(made: Deployment, kind: str, phase: str, cloud: Cloud) -> Path:
    """Have the site that is to leave run on a machine of a cloud; its gate."""
    cloud.stay()
    if LEAVES in made.processes:
        made.end(LEAVES)
    path = made.folder / LEAVES / "site.toml"
    head = path.read_text().partition("[compute]")[0]
    if kind != SIGTERM:
        path.write_text(f'{head}[compute]\nnotices = "{kind}"\n')
    else:
        path.write_text(head)
    if phase == UNMASKING:
        if DROPS in made.processes:
            made.end(DROPS)
        gated(made, DROPS, TRAINING)
    return gated(made, LEAVES, phase, **cloud.environment())


def gated(made: Deployment, site: str, phase: str, **environment: str) -> Path:
    """Start a site that waits in a phase; the file that holds it there."""
    hold = gate_of(made, site)
    hold.with_suffix(".reached").unlink(missing_ok=True)
    hold.unlink(missing_ok=True)
    gate = {phase_gate.PHASE: phase, phase_gate.HOLD: str(hold)}
    started(made, site, **gate, **environment)
    return hold


def give_notice(made: Deployment, kind: str, cloud: Cloud, hold: Path) -> float:
    """Have the site told that it must leave; the seconds until its process ended."""
    log = made.folder / f"{LEAVES}.log"
    before = log.read_text()
    cloud.give_notice(kind)
    process = made.processes.pop(LEAVES)
    begin = CLOCK.monotonic()
    if kind == SIGTERM:
        process.terminate()
    else:
        said = "machine in " if kind == GCE else "this machine in "
        wait_for(lambda: said in log.read_text()[len(before) :], "it is told", 60)
    hold.unlink(missing_ok=True)
    assert process.wait(120) == 0
    return CLOCK.monotonic() - begin


def reach(made: Deployment, phase: str, hold: Path) -> tuple[int, int]:
    """Have the site come to a phase.

    Returns:
        How many rounds were over before, and how many have begun.
    """
    if phase == HANDSHAKE:
        hold.touch()
        begin(made, is_awaited=False)
        first = 0
    else:
        if not made.num_runs():
            begin(made)
        train(made, *SITES)
        first = len(finished(made))
        hold.touch()
    if phase == UNMASKING:
        drop_out(made)
    wait_for(hold.with_suffix(".reached").exists, f"the site is in {phase}", 120)
    return first, begun(made)


def drop_out(made: Deployment) -> None:
    """Have another site die while it trains: the others must remove its masks."""
    gone = gate_of(made, DROPS)
    gone.touch()
    wait_for(gone.with_suffix(".reached").exists, "the other site trains", 120)
    made.kill(DROPS)


def gate_of(made: Deployment, site: str) -> Path:
    """The file that holds a site in its phase."""
    return made.folder / f"{site}.hold"


@pytest.mark.parametrize(("kind", "phase"), CELLS)
def test_notice_costs_one_task_and_the_others_no_round(
    federation: Deployment, cloud: Cloud, kind: str, phase: str
):
    """The site is done in time, and the rounds of the others all count."""
    made = federation
    for site in SITES[1:]:
        if site not in made.processes:
            started(made, site)
    hold = settle(made, kind, phase, cloud)
    runs = made.num_runs()
    first, told_in = reach(made, phase, hold)
    assert give_notice(made, kind, cloud, hold) <= MOST_SECONDS
    if phase == HANDSHAKE:
        # The run needs every site to begin.
        cloud.stay()
        started(made, LEAVES)
        wait_for(lambda: made.num_runs() > runs, "the run begins", 120)
        train(made, *SITES)
    else:
        train(made, *(site for site in SITES[1:] if site in made.processes))
    since = finished(made)[first:]
    lost = [each["round_index"] for each in since if each["status"] != "completed"]
    # The first setup is of all who have promised to take part: it is lost without one.
    assert lost in ([], [1] if phase == HANDSHAKE else [])
    missed = [
        each for each in since if LEAVES in {*each["asked"]} - {*each["answered"]}
    ]
    check_missed(kind, phase, told_in, missed)


def check_missed(
    kind: str, phase: str, told_in: int, missed: list[dict[str, Any]]
) -> None:
    """Which rounds asked the site and have no update of it."""
    rounds = [each["round_index"] for each in missed]
    if phase in {DOWNLOAD, TRAINING} and kind != SIGTERM:
        assert rounds == []  # It has finished its task, and its answer said farewell.
    elif phase in {UPLOAD, UNMASKING} and kind != SIGTERM:
        # That round has its update, which was made before the notice came.
        assert told_in not in rounds
    if phase in {HANDSHAKE, DOWNLOAD, TRAINING} and len(rounds) > 1:
        # Asked to end immediately, it may stay for a second only: a busy aggregator
        # comes too late for its farewell, and asks once more.
        assert kind == SIGTERM
        assert "disconnected" in {failure for failure, _ in missed[0]["failed"]}
    # One that has no task to answer can only end its connection, as an agent does that
    # restarts. If that happens after a round has asked it, this round misses it; the
    # next one waits for a restart in vain, and misses it, too. Then it counts as gone:
    # there is no third. This costs the site nothing, and the others no round.
    assert len(rounds) <= 2
