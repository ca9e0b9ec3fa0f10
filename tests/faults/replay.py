"""The same job in a simulation in which the same is lost on purpose."""

from faults import jobs
from faults.verdict import Run, Weights, flat

from deploy.wiring.simulation import simulate


def replay(run: Run) -> Weights:
    """Simulate a run's job up to its last checkpoint, and lose what it has lost."""
    last = max(run.manifests())
    sites = next(run.of("RunStarted"))["sites"]
    missing = run.missing()
    faults = []
    for site in sites:
        rounds = sorted({*run.lost(), *missing.get(site, [])})
        if rounds:
            faults.append(f'{{site="{site}", kind="crash", rounds={rounds}}}')
    job = jobs.load(
        run.folder / "job.toml",
        f"rounds={last}",
        f"schedule.max_lost_rounds={last + 1}",
        f"simulation.faults=[{', '.join(faults)}]",
        "evaluation.every=0",
        'storage.url="memory://"',
    )
    return flat(simulate(job, folder=None).weights)
