"""Flower's engine gives the weights of the in-process one, bit for bit."""

from pathlib import Path

import pytest
from support.commands import ForkServer
from support.without_report import simulate

from federation.errors import JobError
from federation.job import job_file
from federation.job.spec import JobSpec

pytestmark = [pytest.mark.flower, pytest.mark.slow]

JOBS = Path(__file__).parents[2] / "jobs"


# Masked sums are rounded at random, so bits could not be compared; nor does the engine
# take them.
IN_THE_CLEAR = "privacy.secure_aggregation.enabled=false"


# A process of Ray's takes seconds to start: one run has all that it must keep or judge.
FAULTS = """simulation.faults=[
    { site = "aws-us-east-1", kind = "garbage", rounds = [1] },
    { site = "gcp-us-central1", kind = "nan", rounds = [2] },
    { site = "aws-us-east-1", kind = "crash", rounds = [3] },
]"""
CHANGES = (
    IN_THE_CLEAR,
    "rounds=3",
    FAULTS,
    "simulation.workers=1",
    "schedule.minimum_sites=1",
    "training.local_steps=5",
    'training.optimizer.state="keep"',
    'communication.codec.name="int4"',
    'communication.down_codec.name="fp16"',
)


def _job(*changes: str) -> JobSpec:
    return job_file.load(JOBS / "quickstart.toml", [IN_THE_CLEAR, *changes])


def test_secure_aggregation_is_refused_with_a_way_out():
    """A site's keys are in one process; the message says what can be done."""
    job = job_file.load(JOBS / "quickstart.toml")
    with pytest.raises(JobError, match=IN_THE_CLEAR) as caught:
        simulate(job, engine="flower")
    assert "privacy.secure_aggregation.enabled" in str(caught.value)


@pytest.mark.parametrize("kind", ["duplicate", "restart"])
def test_fault_that_flower_has_no_place_for_is_refused(kind: str):
    """It takes one reply to a message, and keeps no site in memory."""
    fault = f'[{{ site = "aws-us-east-1", kind = "{kind}" }}]'
    with pytest.raises(JobError, match=r"simulation\.faults\[0\]\.kind"):
        simulate(_job(f"simulation.faults={fault}"), engine="flower")


def test_command_line_gives_the_same_model_bit_for_bit(
    server: ForkServer, tmp_path: Path
):
    """Same sites, same coordinator, another grid; and it leaves what any run leaves.

    What a site does wrong is judged the same, values are rounded the same, and
    residuals and optimisers are kept in the run's folder. The working folder, which Ray
    puts first, has modules of the user with our names.
    """
    (tmp_path / "clients").mkdir()
    for name in ("clients/__init__.py", "deploy.py", "cloud_adapters.py"):
        (tmp_path / name).write_text("raise RuntimeError('of the user')\n")
    job = JOBS / "quickstart.toml"
    options = ["--engine", "flower", "--out", "run", "--no-report"]
    for change in CHANGES:
        options += ["--set", change]
    done = server.run("simulate", str(job), *options, folder=tmp_path)
    assert done.code == 0, done.stderr
    simulate(_job(*CHANGES), folder=tmp_path / "inproc")
    ours, flowers = (
        (tmp_path / run / "model.safetensors").read_bytes() for run in ("inproc", "run")
    )
    assert ours == flowers
    assert "accuracy" in done.stdout
