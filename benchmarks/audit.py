"""Does an audit find halved noise, and does it leave correct code alone?

    python benchmarks/audit.py [--job jobs/private.toml] [--seeds 3]
        [--canaries 2000] [--noise 1,0.5] [--smoke]

Each seed is a whole audit of the job, as `crossfed audit` makes it: two runs, at every
site. "Noise" is what the sites add over what their ledgers are charged for: 1 is the
code as it is, 0.5 is a fault made on purpose. A seed draws canaries, sampling and
noise, so that an audit can be repeated. An audit is flagged if any site's promise is
called broken: its p-value, of three tests together, is below 0.05.

`--smoke` audits two rounds with 300 canaries and one seed.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import machine
import numpy as np

from clients.privacy.site_plans import PrivateSites, SitePlan
from clients.training.local_federation import Federation
from deploy.audit.audit import audit, plan_sites
from deploy.audit.runs import Attack
from federation.job import job_file
from federation.job.spec import JobSpec
from federation.protocols import Clock
from monitoring.audit_findings import AuditFindings

JOB = Path(__file__).parents[1] / "jobs" / "private.toml"


def audited(job: JobSpec, canaries: int, noise: float, seed: int) -> AuditFindings:
    """Audit sites that add less noise than they charge their ledgers for."""

    def plan(federation: Federation, clock: Clock) -> PrivateSites | None:
        found = plan_sites(federation, clock)
        if found is None:
            raise SystemExit("audit.py: the job has no differential privacy")
        found.plans = {
            name: _with_noise(plan, noise, _random_bytes(seed, noise, name))
            for name, plan in found.plans.items()
        }
        return found

    coins = _random_bytes(seed, noise, "coins")
    attack = Attack(canaries=canaries, random_bytes=coins)
    return audit(job, attack, plan_sites=plan)


def _with_noise(
    plan: SitePlan, noise: float, random_bytes: Callable[[int], bytes]
) -> SitePlan:
    training = plan.training
    if training is None or training.in_sum:
        raise SystemExit("audit.py: only noise of single sites can be changed here")
    less = noise * training.noise_multiplier
    training = replace(training, noise_multiplier=less, random_bytes=random_bytes)
    return replace(plan, training=training)


def _random_bytes(seed: int, noise: float, name: str) -> Callable[[int], bytes]:
    digest = hashlib.sha256(f"{seed} {noise} {name}".encode()).digest()
    return np.random.default_rng(list(digest)).bytes


def measure(job: JobSpec, canaries: int, noise: float, seed: int) -> dict[str, object]:
    """One audit: p-values of each site and the time that it took."""
    start, busy = time.monotonic(), time.process_time()
    found = audited(job, canaries, noise, seed)
    curves = [site.curve for site in found.sites if site.curve is not None]
    return {
        "noise": noise,
        "seed": seed,
        "flagged": bool(found.broken),
        "inconclusive": bool(found.inconclusive),
        "p": [site.p_value for site in found.sites],
        "p_epsilon_bound": [site.bound > site.promise.epsilon for site in found.sites],
        "p_one_run": [curve.p_values.one_run for curve in curves],
        "p_independent": [curve.p_values.independent for curve in curves],
        "bound": [site.bound for site in found.sites],
        "epsilon": [site.promise.epsilon for site in found.sites],
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(time.process_time() - busy, 1),
    }


def _row(noise: float, rows: Sequence[dict[str, object]]) -> str:
    own = [row for row in rows if row["noise"] == noise]
    flagged = sum(bool(row["flagged"]) for row in own)
    smallest = [min(row["p"]) for row in own]  # type: ignore[call-overload]
    seconds = statistics.median(float(str(row["cpu_seconds"])) for row in own)
    return (
        f"{noise:>6g} {flagged:>4} of {len(own):<4} {min(smallest):>10.2g} "
        f"{statistics.median(smallest):>10.2g} {max(smallest):>10.2g} {seconds:>8.1f}"
    )


def main() -> None:
    """Audit every seed with every noise."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=Path, default=JOB)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--canaries", type=int, default=2000)
    parser.add_argument("--noise", default="1,0.5")
    parser.add_argument("--smoke", action="store_true")
    options = parser.parse_args()
    if options.smoke:
        options.seeds, options.canaries = 1, 300
    job = job_file.load(options.job, ["rounds=2"] if options.smoke else [])
    settings = {"job": job.name, "rounds": job.rounds, "canaries": options.canaries}
    print(json.dumps(machine.facts("audit", **settings)), flush=True)
    rows = []
    noises = [float(text) for text in options.noise.split(",")]
    for seed in range(1, options.seeds + 1):
        for noise in noises:
            rows.append(measure(job, options.canaries, noise, seed))
            print(json.dumps(rows[-1]), flush=True)
    print(
        " noise      flagged      min p   median p      max p    CPU s", file=sys.stderr
    )
    for noise in noises:
        print(_row(noise, rows), file=sys.stderr)


if __name__ == "__main__":
    main()
