"""``crossfed find-rate``: a learning rate and a batch size, before a run."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from clients.user_code import unable_to_exit
from deploy.cli.arguments import load_job
from deploy.cli.terminal import say, say_json, say_table
from deploy.exit_codes import DONE, FAILED
from federation.errors import JobError
from federation.ids import SiteId

if TYPE_CHECKING:
    from clients.training.rate_finder import FoundSettings
    from federation.job.spec import JobSpec

_ROWS = 12


def _find_rate(options: argparse.Namespace) -> int:
    job = load_job(options)
    site = _site(job, options.site)
    from clients.training.rate_finder import check_findable, find_settings  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.wiring import parts as wiring  # noqa: PLC0415 -- imports torch

    check_findable(job)  # Before any data is read.
    wiring.check_sites_are_here(job)
    with unable_to_exit(), wiring.torch_threads(job):
        found = find_settings(
            wiring.build_federation(job),
            site,
            low=options.low,
            high=options.high,
            steps=options.steps,
        )
    if options.json:
        say_json(_document(found))
    else:
        _print(found)
    return FAILED if found.rate is None else DONE


def _document(found: "FoundSettings") -> dict[str, Any]:
    """The same as data; null for values that are not finite."""

    def number(value: float) -> float | None:
        return value if math.isfinite(value) else None

    return {
        "site": found.site,
        "rate": found.rate,
        "noise_scale": number(found.noise_scale),
        "batch_size": found.batch_size,
        "later_batch_sizes": [[*pair] for pair in found.later],
        "diverged": found.rates.diverged,
        "skipped_steps": found.rates.skipped,
        "rates": found.rates.rates,
        "losses": [*map(number, found.rates.losses)],
        "smoothed": [*map(number, found.rates.smoothed)],
    }


def _site(job: "JobSpec", name: str) -> SiteId:
    """The site whose data is used: the first one by default."""
    names = [site.name for site in job.sites]
    if name and name not in names:
        raise JobError(
            f"there is no site {name!r}; the sites are {', '.join(names)}", key="--site"
        )
    return SiteId(name or names[0])


def _print(found: "FoundSettings") -> None:
    rates, losses = found.rates.rates, found.rates.smoothed
    every = max(1, len(rates) // _ROWS)
    rows = list(zip(rates, losses, strict=True))
    say_table(
        ("rate", "loss"),
        ((f"{rate:.2e}", f"{loss:.4f}") for rate, loss in rows[::every]),
    )
    if found.rates.skipped:
        say(f"{found.rates.skipped} steps were skipped: gradients overflowed in fp16")
    if found.rates.diverged:
        say(f"the loss diverges at a learning rate of {rates[-1]:.2e}")
    if found.rate is None:
        say("the loss falls at no rate of this range: choose others with --low, --high")
    else:
        say(f"the loss falls fastest at {found.rate:.2e}: set training.optimizer.lr")
    scale = found.noise_scale
    text = (
        f"{scale:,.0f} records" if math.isfinite(scale) else "beyond what was measured"
    )
    say(f"gradient noise scale {text}; a step of the job has {found.batch_size:,}")
    for first_round, size in found.later:
        say(f"from round {first_round} on a step has {size:,}")
    if found.later:
        say(
            "the learning rate is that of round 1's steps, and larger steps bear a "
            "larger one: repeat the search with training.accumulate set to a later "
            "value, without training.accumulate_from"
        )


VERBS = {"find-rate": _find_rate}
