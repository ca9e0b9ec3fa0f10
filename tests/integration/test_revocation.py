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
