"""What the tables of sites, relays and simulations must not hold."""

import math
from itertools import pairwise

from federation.errors import JobError, broken
from federation.ids import check_name
from federation.job.flower_app_job import ROUND
from federation.job.metrics import CORRECT, TRAINER, metrics_of
from federation.job.spec import SURROGATE, JobSpec
from federation.methods.registry import used_by

TRACKERS = ("tensorboard", "mlflow")  # Of ``simulation.live_metrics``.

_SETTINGS = (bool, int, float, str)


def check_names(job: JobSpec) -> None:
    """Refuse names of a job, its sites and its relays that are none, or not unique.

    Raises:
        JobError: The first such name, or there is no site.
    """
    named = [("name", job.name)]
    named += [(f"sites[{i}].name", site.name) for i, site in enumerate(job.sites)]
    named += [(f"relays[{i}].name", relay.name) for i, relay in enumerate(job.relays)]
    if not job.sites:
        raise JobError("add at least one [[sites]] table", key="sites")
    taken: set[str] = set()
    for key, name in named:
        try:
            check_name(name)
        except ValueError as error:
            raise JobError(str(error), key=key) from None
        if name in taken:
            raise JobError(f"another site or relay is called {name!r}", key=key)
        taken |= {name} if key != "name" else set()


def check_data(job: JobSpec) -> list[JobError]:
    """Refuse a split that does not fit the sites."""
    rules = _rules_of_replicas(job)
    without = [s.name for s in job.sites if s.data is None and s.flower_app is None]
    without = [name for name in without if name not in job.replica_of]
    if job.data is None:
        return broken(rules)
    part, key = job.data.partition, "data.partition.speeds"
    is_used, speeds = part.kind == "proportional", part.speeds
    is_dealt = job.data.placement == "static"
    rules |= {
        "data.placement: some sites have data of their own, which never leave them: "
        "remove sites.data": not (
            is_dealt or all(site.data is None for site in job.sites)
        ),
        f"data.partition.kind: {part.kind!r} is for parts that stay where they are: "
        'use "iid"': not (is_dealt or part.kind == "iid"),
        f'{key}: has no effect with {part.kind!r}: use kind = "proportional"': speeds
        and not is_used,
        f"{key}: has {len(speeds)} numbers for the {len(without)} sites without data "
        "of their own: give one for each": is_used and len(speeds) != len(without),
        f"{key}: is {list(speeds)}: every speed must be above 0": is_used
        and not all(0 < speed < math.inf for speed in speeds),
    }
    return broken(rules)


def _rules_of_replicas(job: JobSpec) -> dict[str, object]:
    sources, rules = {site.name: site.data for site in job.sites}, dict[str, object]()
    groups, key = job.schedule.replicas, "schedule.replicas"
    named = [site for group in groups for site in group]
    for index, group in enumerate(groups):
        place = f"{key}[{index}]"
        unknown = [site for site in group if site not in sources]
        data = [sources.get(site) for site in group]
        rules |= {
            f"{place}: name at least two sites": len(group) < 2,  # noqa: PLR2004
            f"{place}: there is no site {unknown[:1]}": unknown,
            f"{place}: these sites do not all hold the same data: give them one "
            "sites.data, or none of them": any(one != data[0] for one in data),
        }
    rules[f"{key}: names a site twice: {sorted(named)}"] = len({*named}) < len(named)
    return rules


def check_flower_apps(job: JobSpec) -> list[JobError]:
    """Refuse values that a Flower app cannot take."""
    rules: dict[str, object] = {}
    task, reports = job.training.task, CORRECT.keys() & metrics_of(job.training)
    for index, site in enumerate(job.sites):
        app, key = site.flower_app, f"sites[{index}].flower_app"
        if app is None:
            continue
        names = ["arrays", "config", "metrics", "num_examples"]
        names += ["eval_loss"] * app.evaluate
        rules |= {
            f"sites[{index}].data: site {site.name!r} runs a Flower app, which brings "
            "its own data: remove this key": site.data is not None,
            f"{key}.eval_accuracy: must not be empty, since the task {task} reports "
            'accuracy: for an app without it, set training.task to "regression" or '
            "your own objective, or evaluate = "
            "false": app.evaluate and reports and not app.eval_accuracy,
            **{f"{key}.{n}: must not be empty": not getattr(app, n) for n in names},
            f"{key}.config: {app.arrays!r} cannot be two records of one "
            "message": app.arrays == app.config,
            f"{key}.settings.{ROUND}: is reserved for the round number: choose another "
            "name": ROUND in app.settings,
        }
        rules |= {
            f"{key}.settings.{name}: must be a number, a string, true or false: a "
            "Flower record has no tables": not isinstance(value, _SETTINGS)
            for name, value in app.settings.items()
        }
    return broken(rules)


def check_relays(job: JobSpec) -> list[JobError]:
    """Refuse relays that do not fit the sites, or that the job cannot do without."""
    rules: dict[str, object] = {}
    names, relay_of = {site.name for site in job.sites}, dict[str, str]()
    for index, relay in enumerate(job.relays):
        key = f"relays[{index}].sites"
        rules[f"{key}: relay {relay.name!r} has no sites"] = not relay.sites
        for site in relay.sites:
            rules |= {
                f"{key}: there is no site {site!r}; the sites are "
                f"{', '.join(sorted(names))}": site not in names,
                f"{key}: site {site!r} is already behind relay "
                f"{relay_of.get(site)!r}: name it once": site in relay_of,
            }
            relay_of[site] = relay.name
    relays = {relay.name for relay in job.relays}
    lines = [line.relay for line in job.simulation.relays]
    for index, name in enumerate(lines):
        key = f"simulation.relays[{index}].relay"
        rules |= {
            f"{key}: there is no relay {name!r}": name not in relays,
            f"{key}: relay {name!r} has two lines": name in lines[:index],
        }
    for relay in sorted(job.relays, key=lambda relay: -len(relay.sites))[:1]:
        left, quorum = len(job.sites) - len(relay.sites), job.minimum_sites
        is_secure = job.privacy.secure_aggregation.enabled
        key = "schedule.minimum_sites"
        key = "privacy.secure_aggregation.threshold" if is_secure else key
        rules[
            f"{key}: without relay {relay.name!r} {left} of {len(job.sites)} sites are "
            f"left, and a round needs {quorum}: set {key} = {left} if that is allowed, "
            "or give the relay fewer sites"
        ] = left < quorum
    return broken(rules)


def check_simulation(job: JobSpec) -> list[JobError]:
    """Refuse misfortunes and machines of no site, unknown trackers, odd surrogates."""
    simulation, names = job.simulation, {site.name for site in job.sites}
    machines = [machine.site for machine in simulation.machines]
    places = [("faults", i, fault.site) for i, fault in enumerate(simulation.faults)]
    places += [("machines", i, name) for i, name in enumerate(machines)]
    live = simulation.live_metrics
    rules: dict[str, object] = {
        f"simulation.{key}[{index}].site: there is no site {name!r}; the sites are "
        f"{', '.join(sorted(names))}": True
        for key, index, name in places
        if name not in names
    }
    rules |= {
        f"simulation.machines[{index}].away: {[*spell]} must begin and end after what "
        "is before it, without away_share": True
        for index, machine in enumerate(simulation.machines)
        for before, spell in pairwise(((0.0, 0.0), *machine.away))
        if machine.away_share
        or len(spell) != len(before)
        or not before[1] <= spell[0] < spell[1] <= (machine.away_every or math.inf)
    }
    first = {name: index for index, name in reversed([*enumerate(machines)])}
    rules |= {
        f"simulation.machines[{index}].site: site {name!r} has two machines": True
        for index, name in enumerate(machines)
        if first[name] < index
    }
    rules |= {
        f"simulation.faults[{index}].rounds: rounds count from 1, not {first}": (
            first < 1
        )
        for index, fault in enumerate(simulation.faults)
        for first in sorted(fault.rounds)[:1]
    }
    rules |= {
        f"simulation.live_metrics[{index}]: must be {' or '.join(TRACKERS)}, each once "
        f"at most, not {name!r}": name not in TRACKERS or name in live[:index]
        for index, name in enumerate(live)
    }
    return broken(rules) + _surrogate_faults(job)


def _surrogate_faults(job: JobSpec) -> list[JobError]:
    """Refuse what a surrogate of training does not have."""
    if job.simulation.training != SURROGATE:
        return []
    key, keeps = "simulation.training", [m.name for m in used_by(job) if m.keeps]
    rules: dict[str, object] = {
        f"{key}: the surrogate counts local steps: set training.local_steps": (
            job.training.local_steps is None
        ),
        f"{key}: the surrogate uses no records, so nothing is charged: remove "
        "privacy.differential_privacy": job.privacy.differential_privacy.enabled,
        f"{key}: the surrogate keeps nothing from round to round, as "
        f'{", ".join(keeps)} must: use "real"': keeps,
        f'{key}: the surrogate has no loop of your own and no app: use "real"': (
            job.training.task == TRAINER or any(s.flower_app for s in job.sites)
        ),
    }
    return broken(rules)
