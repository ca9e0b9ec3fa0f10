"""A federation of real processes, as the how-to describes it."""

import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from support.deployment import (
    SITES,
    Deployment,
    crossfed_here as crossfed,
    deployed,
    wait_for,
)
from support.programs import needs
from support.releases import another_release

from deploy.wiring.simulation import simulate
from federation import events
from federation.job import job_file
from federation.typed_json import encode
from privacy.dp.ledger.ledger_files import LEDGER_NAME, read_file
from privacy.membership.introduction import release

JOBS = Path(__file__).parents[2] / "jobs"
POLICY = """
privacy = "none"
secure_aggregation = false
accept_two_sites = true
max_clip_norm = 100.0
total_epsilon = 1000.0
functions = [
    "clients.models:*",
    "clients.data:*",
    "clients.frozen_features:oriented_gradients",
    "./work.py:net",
    "./work.py:rings",
]
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.xdist_group("deployed"),
    needs("nginx"),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    # One more is enrolled than takes part in these runs, and its name is the first.
    sites = ["aws-eu-west-1", *SITES]
    folder = tmp_path_factory.mktemp("federation")
    with deployed(folder, POLICY, sites=sites, started=False) as made:
        for site in SITES:
            made.start_site(site)
        yield made


def finish(process: "object") -> dict[str, object]:
    out, err = process.communicate(timeout=400)  # type: ignore[attr-defined]
    assert process.returncode == 0, err  # type: ignore[attr-defined]
    return dict(json.loads(out))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.0.1", "runs crossfed 0.0.1 and the aggregator {0}: upgrade the site "),
        # A run each: they take seconds, and the words are tested with releases.
        pytest.param(
            "99.0",
            "runs crossfed 99.0 and the aggregator {0}: upgrade the aggregator ",
            marks=pytest.mark.long,
        ),
        pytest.param(
            release(),
            "and the aggregator both run crossfed {0}, but not the same code: ",
            marks=pytest.mark.long,
        ),
    ],
)
def test_site_of_another_release_takes_no_part(
    federation: Deployment, tmp_path: Path, version: str, expected: str
):
    """Both ends are told who is to upgrade; that ends the run and nothing else."""
    site, other = SITES[1], another_release(tmp_path, version)
    federation.end(site)
    federation.start_site(site, anew=True, **other)
    job = str(JOBS / "quickstart.toml")
    refused = crossfed("run", job, "--aggregator", federation.config, code=2).stderr
    federation.end(site)
    log = (federation.folder / f"{site}.log").read_text()
    federation.start_site(site)  # Now it is upgraded, and has a part in what follows.
    told = expected.format(release())
    assert f"the run cannot start: site {site!r} does not take part: site " in refused
    assert told in refused
    assert f" is refused: site {site!r} {told}" in log
    assert "Traceback" not in refused + log


def plain_job(folder: Path) -> Path:
    """The quickstart without secure aggregation, whose model has known bits.

    It is a small one, as what is trained takes the same way.
    """
    text = (JOBS / "quickstart.toml").read_text()
    small = 'logistic_regression"\noptions = { inputs = 64, classes = 10 }'
    assert 'digits_cnn"' in text
    text = text.replace('digits_cnn"', small)
    head, _, tail = text.partition("[privacy.secure_aggregation]")
    job = folder / "job.toml"
    job.write_text(head + tail[tail.index("[[sites]]") :])
    return job


CHANGES = (
    'communication.codec.name="bf16"',
    'communication.down_codec.name="fp16"',
    'communication.down_content="change"',
)


FEW_BITS = (
    'communication.codec.name="int4"',
    'communication.down_codec.name="top_k"',
    'communication.down_content="change"',
)


@pytest.mark.parametrize(
    "settings",
    [
        # Whole models are compared where runs are resumed and extended, below.
        pytest.param((), marks=pytest.mark.long),
        pytest.param(CHANGES, marks=pytest.mark.long),
        FEW_BITS,
    ],
    ids=["whole", "changes", "few bits"],
)
def test_the_model_is_that_of_a_simulation(
    federation: Deployment, tmp_path: Path, settings: tuple[str, ...]
):
    """In the clear, where it is the same bit for bit, and so are its bytes."""
    job, settings = plain_job(tmp_path), ("rounds=3", *settings)
    result = finish(federation.run(job, *settings))
    assert result["status"] == "completed"
    run = max((federation.folder / "aggregator" / "runs" / "quickstart").iterdir())
    expected = simulate(job_file.load(job, list(settings)), folder=None)
    for told, row in zip(result["rounds"], expected.view.rounds, strict=True):  # type: ignore[call-overload]
        assert told["bytes_up"] == row.bytes_up
        assert told["bytes_down"] == row.bytes_down
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert {path.name for path in run.iterdir()} >= {
        "job.toml",
        "events.jsonl",
        "result.json",
        "report.html",
        "outcome.json",
    }
    assert "quickstart" in crossfed("ps", "--aggregator", federation.config).stdout


CONSTANT = 'training.learning_rate.name="constant"'


def test_a_run_outlives_its_terminal_and_is_stopped_and_resumed(
    federation: Deployment, tmp_path: Path
):
    """And ends with the model of a run that nobody has touched, also when extended."""
    job, at = plain_job(tmp_path), ("--aggregator", federation.config)
    settings = ["rounds=5", "name=resumed", CONSTANT]
    earlier = federation.num_runs()
    follower = federation.run(job, *settings)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 0, "a round is finished")
    with federation.frozen("coordinator_process"):  # Or it might be done by then.
        follower.send_signal(signal.SIGHUP)
        follower.wait(30)
        crossfed("stop", "resumed", *at)
    watched = crossfed("watch", "resumed", *at, code=130)
    assert "status      stopped" in watched.stdout
    stopped = federation.rounds()
    assert 0 < stopped < 5
    (row,) = [
        r
        for r in json.loads(crossfed("ps", *at, "--json").stdout)
        if r["job"] == "resumed"
    ]
    assert (row["status"], row["rounds"]) == ("stopped", stopped)
    result = finish(federation.run(job, *settings, resume=True))
    assert (result["status"], result["rounds_completed"]) == ("completed", 5)
    logged = [
        json.loads(line)
        for line in crossfed("logs", "resumed", *at, "--json").stdout.splitlines()
    ]
    assert logged == federation.events()
    assert [e["first_round"] for e in logged if e["event"] == "RunStarted"] == [
        1,
        stopped + 1,
    ]
    result = finish(federation.run(job, *settings[1:], extend=6))
    assert (result["status"], result["rounds_completed"]) == ("completed", 6)
    run = max((federation.folder / "aggregator" / "runs" / "resumed").iterdir())
    expected = simulate(job_file.load(job, ["rounds=6", *settings[1:]]), folder=None)
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name


LEVELS = (
    "training.local_steps=5",
    "privacy.secure_aggregation.levels=4",
    'communication.down_content="sum"',
)


def test_few_levels_take_the_bytes_of_a_simulation(federation: Deployment):
    """Both ways, so sites take the server's steps themselves after the first round.

    A deployed site draws its batches by a secret of its own: bits are not those of a
    simulation. That all have the same model, the certificates say.
    """
    job, settings = JOBS / "quickstart.toml", ("rounds=3", "name=few", *LEVELS)
    result = finish(federation.run(job, *settings))
    assert (result["status"], result["rounds_completed"]) == ("completed", 3)
    run = max((federation.folder / "aggregator" / "runs" / "few").iterdir())
    expected = simulate(job_file.load(job, list(settings)), folder=None)
    for told, row in zip(result["rounds"], expected.view.rounds, strict=True):  # type: ignore[call-overload]
        assert told["bytes_up"] == row.bytes_up
        assert told["bytes_down"] == row.bytes_down
    first, _, last = (row["bytes_down"] for row in result["rounds"])  # type: ignore[attr-defined]
    assert last < first / 4
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].shape == values.shape
        assert abs(found[name] - values).max() < 0.5


@pytest.mark.long  # With a restart in one process: test_few_levels.py.
def test_site_that_is_killed_goes_on_with_few_levels(federation: Deployment):
    """It has lost its keys and the model, and finds its residual on its disk."""
    earlier = federation.num_runs()
    settings = ("rounds=12", "name=few-killed", *LEVELS)
    process = federation.run(JOBS / "quickstart.toml", *settings)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 2, "rounds continue")
    federation.kill_any(SITES[1])
    assert federation.rounds() < 12
    federation.start_site(SITES[1])
    result = finish(process)
    assert result["status"] == "completed"
    completed = result["rounds_completed"]
    assert isinstance(completed, int)
    assert 9 <= completed < 12
    log = (federation.folder / f"{SITES[1]}.log").read_text()
    assert "has no state" not in log


@pytest.mark.long  # In one process: test_extension.py.
def test_a_finished_run_is_extended(federation: Deployment, tmp_path: Path):
    """It ends as a longer one; and its model is what another run begins with."""
    job, at = plain_job(tmp_path), federation.folder / "aggregator" / "runs"
    settings = ["name=extended", CONSTANT]
    finish(federation.run(job, *settings, "rounds=1"))
    result = finish(federation.run(job, *settings, extend=2))
    assert (result["status"], result["rounds_completed"]) == ("completed", 2)
    model = max((at / "extended").iterdir()) / "model.safetensors"
    expected = simulate(job_file.load(job, [*settings, "rounds=2"]), folder=None)
    found = load_file(model)
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name
    settings = ["rounds=1", "name=from-extended", f"model.weights={model.parent}"]
    finish(federation.run(job, *settings))
    (started,) = [e for e in federation.events() if e["event"] == "RunStarted"]
    assert started["weights"].startswith(f"{model.parent}@")
    found = load_file(max((at / "from-extended").iterdir()) / model.name)
    expected = simulate(job_file.load(job, settings), folder=None)
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name


@pytest.mark.long  # In one process: test_extension.py.
def test_a_run_with_secure_aggregation_is_extended(federation: Deployment):
    """Sites agree on another contract, and answer no number twice."""
    job = JOBS / "quickstart.toml"
    finish(federation.run(job, "name=secret", CONSTANT, "rounds=2"))
    result = finish(federation.run(job, "name=secret", CONSTANT, extend=4))
    assert (result["status"], result["rounds_completed"]) == ("completed", 3)
    events = federation.events()
    ended = [e for e in events if e["event"] == "RoundFinished"]
    assert [e["round_index"] for e in ended] == [1, 2, 4]
    assert {e["status"] for e in ended} == {"completed"}
    (extended,) = [e for e in events if e["event"] == "RunExtended"]
    assert (extended["rounds_before"], extended["rounds"]) == (2, 4)


@pytest.mark.long  # With restarts in one process: test_site_agent.py.
def test_kept_optimisers_outlive_a_kill_on_either_side(
    federation: Deployment, tmp_path: Path
):
    """A site and its coordinator are killed in a round, which is then done again."""
    job, settings = (
        plain_job(tmp_path),
        ["rounds=12", "name=kept", 'training.optimizer.state="keep"'],
    )
    earlier = federation.num_runs()
    process = federation.run(job, *settings)
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 2, "rounds continue")
    federation.kill_any("coordinator_process")  # First: it would count the site out.
    federation.kill_any(SITES[1])
    assert federation.rounds() < 12
    federation.start_site(SITES[1])
    result = finish(process)
    assert (result["status"], result["rounds_completed"]) == ("completed", 12)
    run = max((federation.folder / "aggregator" / "runs" / "kept").iterdir())
    expected = simulate(job_file.load(job, list(settings)), folder=None)
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name
    log = (federation.folder / f"{SITES[1]}.log").read_text()
    assert "has no state" not in log


@pytest.mark.long  # In one process: test_deployed_noise.py.
def test_sites_plan_the_noise_of_a_simulation(federation: Deployment, tmp_path: Path):
    """Over Flower, in two questions, though neither site sees the other's data."""
    head, *blocks = (JOBS / "joint.toml").read_text().split("[[sites]]")
    mine = [b for b in blocks if any(f'"{site}"' in b for site in SITES)]
    job = tmp_path / "job.toml"
    job.write_text("[[sites]]".join([head, *mine]))
    settings = ["rounds=2", "privacy.secure_aggregation.two_sites_waiver=true"]
    assert finish(federation.run(job, *settings))["status"] == "completed"
    (planned,) = [e for e in federation.events() if e["event"] == "PrivacyPlanned"]
    simulated: list[events.Event] = []
    simulate(job_file.load(job, list(settings)), listeners=[simulated.append])
    (expected,) = [e for e in simulated if isinstance(e, events.PrivacyPlanned)]
    assert planned["unit"] == "joint"
    assert planned["sites"] == [encode(site) for site in expected.sites]


def charges(federation: Deployment, site: str) -> int:
    """How often a site was charged for training in the newest run."""
    run = federation.events()[0]["run_id"]
    folder = federation.folder / site / "runs" / run / "sites" / site
    found = read_file(folder / LEDGER_NAME).charges
    return sum(charge.purpose == "train" for charge in found)


def train_some(federation: Deployment, *settings: str, resume: bool) -> None:
    """Run, or continue with the newest run, until a round is done; then stop it."""
    runs, rounds = federation.num_runs(), federation.rounds() if resume else 0
    process = federation.run(JOBS / "private.toml", *settings, resume=resume)
    wait_for(lambda: resume or federation.num_runs() > runs, "the run begins")
    wait_for(lambda: federation.rounds() > rounds, "a round is finished")
    crossfed("stop", "private", "--aggregator", federation.config)
    process.communicate(timeout=120)


@pytest.mark.long  # In one process: test_restored_site.py.
def test_site_from_a_backup_refuses_before_anybody_is_charged(federation: Deployment):
    """A new coordinator proposes the run, and the site's anchor with it."""
    site, other = SITES
    settings = ["rounds=60"]
    folder, backup = federation.folder / site, federation.folder / "backup"
    train_some(federation, *settings, resume=False)
    federation.end(site)
    shutil.copytree(folder, backup)
    federation.start_site(site)
    train_some(federation, *settings, resume=True)
    federation.end(site)
    shutil.rmtree(folder)
    backup.rename(folder)
    behind, before = charges(federation, site), charges(federation, other)
    assert behind < before
    federation.start_site(site)
    process = federation.run(JOBS / "private.toml", *settings, resume=True)
    _, told = process.communicate(timeout=400)
    assert process.returncode == 2
    assert f"site {site!r} does not take part: " in told
    assert "crossfed ledger recover" in told
    assert charges(federation, site) == behind
    assert charges(federation, other) == before
    federation.end(site)
    run, config = federation.events()[0]["run_id"], str(folder / "site.toml")
    crossfed("ledger", "recover", run, "--config", config)
    assert charges(federation, site) == before
    federation.start_site(site)
    train_some(federation, *settings, resume=True)
    assert charges(federation, site) > before


def test_doctor_finds_a_site_ready(federation: Deployment):
    """From its files to the way to the aggregator."""
    path = federation.folder / SITES[0] / "site.toml"
    found = crossfed("doctor", "--site", str(path), "--json").stdout
    checks = {each["name"]: each for each in json.loads(found)["checks"]}
    assert checks["admission"]["status"] == "ok"
    assert checks["aggregator"]["found"].startswith("127.0.0.1:")
    assert checks["clock skew"]["status"] == checks["certificate"]["status"] == "ok"


@pytest.mark.parametrize(
    ("line", "other", "told", "noted"),
    [
        (
            'privacy = "none"',
            'privacy = "record"',
            "site {0!r} requires 'record' (policy.privacy), but the job has 'none'",
            "",
        ),
        pytest.param(
            'source = ""',
            'source = "no_such_module:load"',
            "site {0!r} cannot load its data; its log says why",
            "there is no module 'no_such_module'",
            marks=pytest.mark.long,  # The way of a refusal is the same.
        ),
    ],
)
def test_site_that_refuses_names_the_key(
    federation: Deployment, line: str, other: str, told: str, noted: str
):
    """Nothing is trained, and both ends are told; of its data, its log alone."""
    site = SITES[0]
    path = federation.folder / site / "site.toml"
    text = path.read_text()
    assert line in text
    federation.end(site)
    path.write_text(text.replace(line, other))
    federation.start_site(site)
    job = str(JOBS / "quickstart.toml")
    refused = crossfed("run", job, "--aggregator", federation.config, code=2).stderr
    federation.end(site)
    path.write_text(text)
    federation.start_site(site)
    log = (federation.folder / f"{site}.log").read_text()
    assert f"the run cannot start: site {site!r} does not take part: " in refused
    assert told.format(site) in refused
    assert " is refused: " in log
    assert told.format(site) in log
    assert noted in log
    assert "Traceback" not in refused + log


def test_every_party_has_its_copy_of_a_users_file(
    federation: Deployment, tmp_path: Path
):
    """No code travels: the run ends before it begins where a copy differs."""
    crossfed("new", str(tmp_path / "mine"))
    job, code = tmp_path / "mine" / "job.toml", tmp_path / "mine" / "work.py"
    for place in ("aggregator", *SITES):
        shutil.copy(code, federation.folder / place)
    result = finish(federation.run(job, "rounds=1"))
    assert (result["status"], result["rounds_completed"]) == ("completed", 1)
    other = federation.folder / SITES[1] / "work.py"
    other.write_text(other.read_text() + "# Another version.\n")
    refused = crossfed("run", str(job), "--aggregator", federation.config, code=2)
    assert f"site {SITES[1]!r} does not take part: model.factory: " in refused.stderr
    assert "work.py is not the file" in refused.stderr
    assert f"{other} has changed" in (federation.folder / f"{SITES[1]}.log").read_text()


@pytest.mark.long  # One by one they are in the fault matrix.
def test_whatever_is_killed_the_run_goes_on(federation: Deployment):
    """Coordinator, SuperLink, proxy, SuperExec and a site: a round each at most."""
    earlier, num_rounds, kills = federation.num_runs(), 12, 0
    process = federation.run(JOBS / "private.toml", f"rounds={num_rounds}")
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    for victims in (
        ("coordinator_process",),
        ("superlink_process",),
        ("nginx: master",),
        # A site is let in again after 20 s: the SuperExec is back long before.
        (SITES[1], "superexec_process"),
    ):
        before = federation.rounds()
        wait_for(lambda n=before: federation.rounds() > n + 1, "rounds continue")
        for victim in victims:
            federation.kill_any(victim)
            kills += 1
        if SITES[1] not in federation.processes:
            federation.start_site(SITES[1])
    result = finish(process)
    assert result["status"] == "completed"
    # The coordinator whose SuperExec was killed said so.
    ends = [e for e in federation.events() if e["event"] == "RunFinished"]
    why = [end["message"] for end in ends if end["status"] == "interrupted"]
    assert [text for text in why if text.startswith("its SuperExec (process ")], why
    assert not [text for text in why if "SystemExit" in text]
    # Each round at most once, and only what was in flight was lost.
    completed = result["rounds_completed"]
    assert isinstance(completed, int)
    assert num_rounds - kills - 1 <= completed <= num_rounds
    check_ledgers(federation, num_rounds)


def check_ledgers(federation: Deployment, num_rounds: int) -> None:
    """No ledger shows less than was released, and no round was charged twice."""
    events = federation.events()
    run_id = next(e["run_id"] for e in events if e["event"] == "RunStarted")
    for site in SITES:
        folder = federation.folder / site / "runs" / run_id / "sites" / site
        shown = crossfed("ledger", str(folder / "ledger.jsonl"), "--json").stdout
        (ledger,) = json.loads(shown)["ledgers"]
        spent = ledger["spent"]["train"]
        released = {
            e["round_index"]
            for e in events
            if e["event"] == "SiteAnswered" and e["site"] == site
        }
        assert ledger["sound"]
        assert spent["rounds"] >= len(released - {0})
        assert spent["charges"] == spent["rounds"] <= num_rounds
        assert spent["epsilon"] <= ledger["epsilon_cap"]
