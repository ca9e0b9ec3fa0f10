"""Memory of a site's agent, where one operator runs several on one host.

    python benchmarks/agents_memory.py [--sites 4] [--ways alone shared] [--secure]

A real federation: an aggregator behind nginx, and agents that are started one by one
(`alone`) or by one command for a folder of sites (`shared`). The job trains a small
network on digits for two rounds, without secure aggregation or with it. An agent's
private pages are those that no other process has, before the run and after it; its
proportional share (`pss`) counts a page of several processes for a part.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import machine

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.deployment import (  # noqa: E402
    Deployment,
    deployed,
    descendants,
    wait_for,
)

MIB_KIB = 1024
POLICY = """
privacy = "none"
max_clip_norm = 100.0
"""
PLAIN_POLICY, SECURE_POLICY = "secure_aggregation = false\n", "min_group = 1\n"
JOB = """
name = "small"
rounds = 2
data = { source = "clients.data:digits" }
training = { local_steps = 5, batch_size = 8 }
[model]
factory = "clients.models:digits_cnn"
"""
SECURE = """
[privacy.secure_aggregation]
enabled = true
clip_norm = 10.0
max_examples = 2000
"""


def own_mib(pid: int) -> dict[str, float]:
    """What a process has for itself, and its share of what it has with others."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    private = kib["Private_Clean"] + kib["Private_Dirty"]
    return {"private": private / MIB_KIB, "pss": kib["Pss"] / MIB_KIB}


def start(made: Deployment, sites: Sequence[str], way: str) -> list[int]:
    """Have all agents connected; the numbers of their processes."""
    logs = [made.folder / f"{site}.log" for site in sites]
    for site in sites if way == "alone" else ():
        made.start_site(site)
    if way == "shared":
        made.start("agents", "site", "up", "--config", str(made.folder))
        logs = [made.folder / site / "agent.log" for site in sites]

    def are_connected() -> bool:
        return all(log.exists() and "connected to" in log.read_text() for log in logs)

    wait_for(are_connected, "all agents connect")
    if way == "shared":
        return sorted(descendants(made.processes["agents"].pid))
    return [made.processes[site].pid for site in sites]


def measure(way: str, num_sites: int, *, is_secure: bool) -> dict[str, object]:
    """Start agents, read their memory, train, and read it again."""
    sites = [f"site-{number}" for number in range(num_sites)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "federation"
        folder.mkdir(mode=0o700)
        policy = POLICY + (SECURE_POLICY if is_secure else PLAIN_POLICY)
        with deployed(folder, policy, sites=sites, forked=False, started=False) as made:
            pids = start(made, sites, way)
            idle = [own_mib(pid) for pid in pids]
            job = folder / "small.toml"
            tables = "".join(f'[[sites]]\nname = "{site}"\n' for site in sites)
            job.write_text(JOB + (SECURE if is_secure else "") + tables)
            process = made.run(job)
            _, said = process.communicate()
            if process.returncode:
                raise SystemExit(said)
            after = [own_mib(pid) for pid in pids]
    found: dict[str, object] = {"way": way, "sites": num_sites, "secure": is_secure}
    for when, rows in (("idle", idle), ("after", after)):
        for kind in ("private", "pss"):
            values = [row[kind] for row in rows]
            found[f"{when}_{kind}_mib"] = statistics.median(values)
            found[f"{when}_{kind}_most_mib"] = max(values)
    return found


def main() -> None:
    """Measure each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--ways", nargs="+", default=["alone", "shared"])
    parser.add_argument("--secure", action="store_true")
    options = parser.parse_args()
    settings = {"sites": options.sites, "secure": options.secure}
    print(json.dumps(machine.facts("agents_memory", **settings)))
    for way in options.ways:
        row = measure(way, options.sites, is_secure=options.secure)
        print(json.dumps(row), flush=True)
        told = {key: value for key, value in row.items() if key.endswith("_mib")}
        print(way, *(f"{k} {v:.0f}" for k, v in told.items()), file=sys.stderr)


if __name__ == "__main__":
    main()
