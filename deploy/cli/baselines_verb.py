"""``crossfed baselines``: pooled data, each site alone and the federation."""

import argparse
import json
from pathlib import Path

from clients.user_code import unable_to_exit
from deploy.cli.arguments import load_job
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE
from federation.errors import JobError

PAGE, RESULT = "baselines.html", "baselines.json"
MOST_SITES = 6  # Columns of a terminal; page and JSON have all.


def _baselines(options: argparse.Namespace) -> int:
    job = load_job(options)
    from deploy.tools.baselines import baselines  # noqa: PLC0415 -- imports torch
    from federation.durable_files import replace_file  # noqa: PLC0415 -- as above
    from monitoring.pages.baselines_page import write_baselines  # noqa: PLC0415

    folder: Path = options.out or Path("baselines") / job.name
    if (folder / RESULT).exists():
        raise JobError(
            f"{folder} has baselines of an earlier call: choose a new folder",
            key="--out",
        )
    seeds = range(job.seed, job.seed + options.seeds)
    with unable_to_exit():
        found = baselines(job, seeds=seeds, clock=options.clock, say=tell)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found.document(), indent=1)
    replace_file(folder / RESULT, [text.encode()])
    write_baselines(found, folder / PAGE)
    if options.json:
        say_json({**found.document(), "page": str(folder / PAGE)})
        return DONE
    for metric in found.metrics:
        say_table(*found.table(metric, MOST_SITES))
        say("")
    for line in (found.work, *found.notes):
        say(line)
    say(f"page  {folder / PAGE}")
    return DONE


VERBS = {"baselines": _baselines}
