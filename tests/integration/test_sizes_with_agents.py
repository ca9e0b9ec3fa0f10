"""A site grows in the middle of a real run, and the model is that of one without it.

One site is a machine of EC2 as in ``test_cloud_sites``: the cloud is on loopback, and
what it launches is booted as processes of this host. The other is a local process.
"""

import json
from pathlib import Path

import pytest
from integration import test_cloud_sites
from integration.test_cloud_sites import AWS_SITE, GCP_SITE, RELEASE, Clouds, Machine
from safetensors.numpy import load_file
from support import slow_models
from support.deployment import wait_for
from support.ec2_server import IMAGE, REGION
from support.fake_platforms import ACCOUNT, ROLE
from support.programs import needs

from cloud_adapters.net.ports import free_port
from deploy.wiring.simulation import simulate
from federation.job import job_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]
made = test_cloud_sites.clouds
ROUNDS, LOCAL_STEPS = 8, 4
JOB = f"""
name = "growing"
rounds = {ROUNDS}
evaluation = {{ every = 0 }}
training = {{ local_steps = {LOCAL_STEPS}, optimizer = {{ lr = 0.1, momentum = 0.9 }} }}
data = {{ source = "clients.data:digits" }}
sites = [{{ name = "{AWS_SITE}" }}, {{ name = "{GCP_SITE}" }}]
[model]
factory = "support.slow_models:slow_network"
options = {{ inputs = 64, classes = 10 }}
"""
POLICY = """
privacy = "none"
secure_aggregation = false
functions = ["support.slow_models:*", "clients.data:*"]
"""
# Of a step on the smaller machine. The other one is ten times as fast.
STEP_SECONDS = "0.5"


def write(made: Clouds) -> Path:
    """Write job and deployment; the job."""
    job = made.folder / "job.toml"
    job.write_text(JOB)
    made.path.write_text(f"""
name = "fed"
job = "job.toml"
start = {{ machine_minutes = 0.01 }}
{RELEASE}
[aggregator]
address = "127.0.0.1:{free_port()}"
[platforms]
sts = "{made.sts.url}/"

[[sites]]
name = "{AWS_SITE}"
provider = "aws"
sizes = [
    {{ type = "m5.large", speed = 1.0, dollars_per_hour = 0.1 }},
    {{ type = "m5.xlarge", speed = 10.0, dollars_per_hour = 0.2 }},
]
[sites.machine]
region = "{REGION}"
type = "m5.large"
image = "{IMAGE}"
identity = "crossfed-profile"
role = "arn:aws:iam::{ACCOUNT}:role/{ROLE}"
endpoint = "{made.aws.url}"
[sites.home]
url = "file://{made.folder}/home"
lease_seconds = 2
[sites.policy]
{POLICY}
[[sites]]
name = "{GCP_SITE}"
dollars_per_hour = 1.0
[sites.policy]
{POLICY}
""")
    return job


def begin_to_work(machine: Machine, made: Clouds) -> None:
    process = machine.enrol()
    _, err = process.communicate(120)
    assert process.returncode == 0, err + made.told
    machine.work()


def test_a_site_grows_and_the_model_is_that_of_an_undisturbed_run(
    made: Clouds, monkeypatch: pytest.MonkeyPatch
):
    """By the rule's own decision; the run pauses once, and no round is lost."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    job = write(made)
    up = made.up("--keep", "--json")
    small = made.boot("aws")
    small.environment[slow_models.SECONDS] = STEP_SECONDS
    begin_to_work(small, made)

    def has_grown() -> bool:
        assert up.poll() is None, made.told
        return len(made.aws.launches()) > 1

    wait_for(has_grown, "a larger machine is launched", 240)
    assert made.aws.launches()[-1]["InstanceType"] == "m5.xlarge"
    # As EC2 does, which was asked to end it.
    wait_for(lambda: len(made.aws_nodes()) == 1, "the smaller one is ended", 60)
    small.end()
    begin_to_work(made.boot("aws"), made)
    out, err = up.communicate(400)
    assert up.returncode == 0, err
    result = json.loads(out)
    assert (result["status"], result["rounds_completed"]) == ("completed", ROUNDS)
    assert "m5.xlarge instead of m5.large" in err
    (run,) = (made.aggregator / "runs" / "growing").iterdir()
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    starts = [e["first_round"] for e in events if e["event"] == "RunStarted"]
    assert len(starts) == 2
    rounds = [e["status"] for e in events if e["event"] == "RoundFinished"]
    assert rounds == ["completed"] * ROUNDS
    expected = simulate(job_file.load(job), folder=None)
    found = load_file(run / "model.safetensors")
    for name, values in expected.weights.items():
        assert found[name].tobytes() == values.tobytes(), name
    assert made.nodes() == []
    assert made.aws_nodes() == []
