"""A federation of real processes, as the how-to describes it."""

import json
import re
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

from clients.models.starting_weights import pinned
from deploy.wiring.simulation import simulate
from federation.job import job_file
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


def test_site_of_another_release_takes_no_part(federation: Deployment, tmp_path: Path):
    """Both ends are told who is to upgrade; that ends the run and nothing else."""
    site, other = SITES[1], another_release(tmp_path, "0.0.1")
    federation.end(site)
    federation.start_site(site, anew=True, **other)
    job = str(JOBS / "quickstart.toml")
    refused = crossfed("run", job, "--aggregator", federation.config, code=2).stderr
    federation.end(site)
    log = (federation.folder / f"{site}.log").read_text()
    federation.start_site(site)  # Now it is upgraded, and has a part in what follows.
    told = f"runs crossfed 0.0.1 and the aggregator {release()}: upgrade the site "
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


FEW_BITS = (
    'communication.codec.name="int4"',
    'communication.down_codec.name="top_k"',
    'communication.down_content="change"',
)


def test_the_model_is_that_of_a_simulation(federation: Deployment, tmp_path: Path):
    """In the clear, where it is the same bit for bit, and so are its bytes."""
    job, settings = plain_job(tmp_path), ("rounds=3", *FEW_BITS)
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


@pytest.mark.long
def test_a_model_is_evaluated_at_the_sites(federation: Deployment, tmp_path: Path):
    """As in a simulation, in the clear and with masks, also if a coordinator dies."""
    job, model = plain_job(tmp_path), tmp_path / "model"
    simulate(job_file.load(job, ["rounds=2"]), folder=model, report=False)
    plain = pinned(job_file.load(job, evaluated=str(model)), tmp_path)
    wanted = simulate(plain, folder=None).summary()["final"]
    words = (str(job), "--aggregator", federation.config, "--json")
    found = json.loads(crossfed("run", *words, "--evaluate", str(model)).stdout)
    assert found["final"] == wanted
    assert found["rounds_completed"] == 0
    size = (model / "model.safetensors").stat().st_size
    for site in found["sites"]:  # The model travels once.
        assert size < site["bytes_down"] < 1.2 * size
    secure = tmp_path / "secure.toml"
    secure.write_text(job.read_text() + SECURE)
    earlier = federation.num_runs()
    words = (str(secure), "--aggregator", federation.config, "--json")
    process = federation.follow("run", *words, "--evaluate", str(model))
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    federation.kill_any("coordinator_process")
    masked = finish(process)["final"]
    assert masked["accuracy"] == wanted["accuracy"]  # type: ignore[index]
    assert masked["loss"] == pytest.approx(wanted["loss"], abs=1e-6)  # type: ignore[index]


SECURE = """
[privacy.secure_aggregation]
enabled = true
two_sites_waiver = true
max_examples = 1500
"""
CONSTANT = 'training.learning_rate.name="constant"'


def test_a_run_outlives_its_terminal_and_is_stopped_and_resumed(
    federation: Deployment, tmp_path: Path
):
    """And ends with the model of a run that nobody has touched, also when extended."""
    job, at = plain_job(tmp_path), ("--aggregator", federation.config)
    settings = ["rounds=5", "name=resumed", CONSTANT]
    reporting, kept = SITES[0], federation.folder / SITES[0] / "site.toml"
    text = kept.read_text()
    # A site reads its policy again for each run.
    kept.write_text(text.replace("[policy]", "[policy]\nreport_energy = true"))
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
    of_site = ("--config", str(kept))
    told = crossfed("site", "status", *of_site).stdout
    assert re.search(r"job 'resumed', stopped, .*\n.*\n.*\n.* and energy", told)
    result = finish(federation.run(job, *settings, resume=True))
    assert (result["status"], result["rounds_completed"]) == ("completed", 5)
    kept.write_text(text)
    taken = {s["site"]: s["resources"]["energy"] for s in result["sites"]}  # type: ignore[index, attr-defined]
    assert [site for site, energy in taken.items() if energy] == [reporting]
    low, high = taken[reporting]["joules"]
    assert 0 < low <= high
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


@pytest.mark.long
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


def charges(federation: Deployment, site: str) -> int:
    """How often a site was charged for training in the newest run."""
    run = federation.events()[0]["run_id"]
    folder = federation.folder / site / "runs" / run / "sites" / site
    found = read_file(folder / LEDGER_NAME).charges
    return sum(charge.purpose == "train" for charge in found)


def test_sites_that_are_connected_are_known(federation: Deployment):
    """The operator sees which agents do not run."""
    listed = crossfed("aggregator", "sites", "--json", "--config", federation.config)
    rows = {row["site"]: row["connected"] for row in json.loads(listed.stdout)["sites"]}
    assert rows == {"aws-eu-west-1": False, **dict.fromkeys(SITES, True)}


def test_doctor_finds_a_site_ready(federation: Deployment):
    """From its files to the way to the aggregator."""
    path = federation.folder / SITES[0] / "site.toml"
    found = crossfed("doctor", "--site", str(path), "--json").stdout
    checks = {each["name"]: each for each in json.loads(found)["checks"]}
    assert checks["admission"]["status"] == "ok"
    assert checks["aggregator"]["found"].startswith("127.0.0.1:")
    assert checks["clock skew"]["status"] == checks["certificate"]["status"] == "ok"


def test_site_that_refuses_names_the_key(federation: Deployment):
    """Nothing is trained, and both ends are told."""
    site = SITES[0]
    told = f"site {site!r} requires 'record' (policy.privacy), but the job has 'none'"
    path = federation.folder / site / "site.toml"
    text = path.read_text()
    assert 'privacy = "none"' in text
    federation.end(site)
    path.write_text(text.replace('privacy = "none"', 'privacy = "record"'))
    federation.start_site(site)
    job = str(JOBS / "quickstart.toml")
    refused = crossfed("run", job, "--aggregator", federation.config, code=2).stderr
    federation.end(site)
    path.write_text(text)
    federation.start_site(site)
    log = (federation.folder / f"{site}.log").read_text()
    assert f"the run cannot start: site {site!r} does not take part: " in refused
    assert told in refused
    assert " is refused: " in log
    assert told in log
    other = (federation.folder / f"{SITES[1]}.log").read_text()
    assert re.search(r"run \S+ failed before it began here: job 'quickstart'", other)
    assert "Traceback" not in refused + log


@pytest.mark.long
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


@pytest.mark.long
def test_killed_site_is_named_while_the_run_waits_for_it(federation: Deployment):
    """With secure aggregation a new setup waits first, which has no round."""
    earlier, site = federation.num_runs(), SITES[1]
    process = federation.run(
        JOBS / "quickstart.toml", "rounds=6", "name=killed", "training.local_steps=2"
    )
    wait_for(lambda: federation.num_runs() > earlier, "the run begins")
    wait_for(lambda: federation.rounds() > 0, "a round is finished")
    federation.kill(site)

    def warnings() -> str:
        return "\n".join(e["message"] for e in federation.events("Warned"))

    wait_for(lambda: f"for {site}" in warnings(), "the run names the site")
    listed = crossfed("ps", "--aggregator", federation.config, "--json").stdout
    federation.start_site(site)
    (row,) = (row for row in json.loads(listed) if row["job"] == "killed")
    what = "the setup of secure aggregation waits"
    assert f"{site} (not connected: {what})" in row["without"]
    out, err = process.communicate(timeout=400)
    assert json.loads(out)["status"] == "completed"
    assert re.search(rf"warning +{what} up to .* for {site}, which is disconn", err)


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
