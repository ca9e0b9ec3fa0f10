"""A site is shut out of a federation of real processes, and another takes its name."""

import json
from pathlib import Path

import pytest
from support.deployment import (
    SITES,
    Deployment,
    crossfed,
    crossfed_here,
    deployed,
    wait_for,
)
from support.programs import needs

from cloud_adapters.flower import simulation as flower_simulation
from deploy.aggregator_host import host_secrets

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    needs("nginx"),
]

STAYS, GOES = SITES
POLICY = 'privacy = "none"\nsecure_aggregation = false\n'
JOB = f"""
name = "short"
rounds = 200
model.factory = "clients.models:logistic_regression"
model.options = {{ inputs = 64, classes = 10 }}
data.source = "clients.data:digits"
training.local_steps = 1
training.learning_rate.name = "constant"
sites = [{{ name = "{STAYS}" }}, {{ name = "{GOES}" }}]
"""


def _log(federation: Deployment, name: str) -> str:
    return (federation.folder / f"{name}.log").read_text()


def _online(federation: Deployment) -> int:
    """Nodes that the SuperLink itself counts."""
    flower_simulation.import_flower()
    from cloud_adapters.superlink.control import FlowerControl  # noqa: PLC0415

    home = federation.folder / "aggregator"
    port = (home / "flower" / "port").read_text()
    authority = (home / "ca.crt").read_bytes()
    secret = host_secrets.read(home / host_secrets.CONTROL)
    with FlowerControl(f"127.0.0.1:{port}", authority, secret) as control:
        return sum(node.status == "online" for node in control.nodes())


def test_revoked_site_is_shut_out_while_another_renews(tmp_path: Path):
    """By the proxy, by Flower and by the roster; its name is free for new keys."""
    with deployed(tmp_path, 'privacy = "none"\n') as federation:
        for site in SITES:
            wait_for(
                lambda s=site: "connected to" in _log(federation, s), f"{site} connects"
            )
        wait_for(lambda: _online(federation) == 2, "both are online")
        crossfed("enroll", "--renew", "--folder", str(tmp_path / STAYS))

        crossfed("aggregator", "revoke", GOES, "--config", federation.config)

        assert _online(federation) == 1
        assert federation.processes.pop(GOES).wait(120) == 2
        assert "expired or revoked" in _log(federation, GOES)
        assert "Traceback" not in _log(federation, GOES)
        assert federation.processes[STAYS].poll() is None
        refused = crossfed(
            "enroll", "--renew", "--folder", str(tmp_path / GOES), code=1
        )
        assert "revoked" in refused.stderr

        invited = crossfed("aggregator", "invite", GOES, "--config", federation.config)
        fresh = str(tmp_path / "fresh")
        crossfed_here("enroll", "--folder", fresh, given=invited.stdout)
        config = str(tmp_path / "fresh" / "site.toml")
        federation.start("fresh", "site", "up", "--config", config)
        wait_for(lambda: _online(federation) == 2, "the new one is online")

        listed = crossfed(
            "aggregator", "sites", "--json", "--config", federation.config
        )
        rows = json.loads(listed.stdout)["sites"]
        assert [(row["state"], row["site"]) for row in rows] == [
            ("enrolled", STAYS),
            ("enrolled", GOES),
            ("revoked", GOES),
        ]


def test_run_says_that_its_site_was_revoked_and_what_to_do(tmp_path: Path):
    """In its record, at the command line, in its report, and at the site itself."""
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    with deployed(tmp_path, POLICY) as federation:
        follower = federation.run(job)
        wait_for(lambda: federation.rounds("completed") > 1, "two rounds")
        crossfed("aggregator", "revoke", GOES, "--config", federation.config)
        _, said = follower.communicate(timeout=300)
        assert follower.returncode == 1
        assert federation.processes.pop(GOES).wait(120) == 2

        (end,) = federation.events("RunFinished")
        failed = {event["message"] for event in federation.events("SiteFailed")}
        assert failed == {"the site was revoked"}
        assert not federation.events("Warned")  # Nobody waits for such a site.
        runs = (tmp_path / "aggregator" / "runs").glob("*/*/report.html")
        (report,) = [path.read_text() for path in runs]
        for text in (end["message"], said, report):
            assert f"revoked: {GOES}" in text
            assert "aggregator invite" in text
            assert "--resume" not in text
        config = str(tmp_path / GOES / "site.toml")
        status = crossfed("site", "status", "--config", config).stdout
        assert "rejects this site" in status
        assert "invitation" in status
