"""The command line: ``crossfed VERB``.

Standard output is data, standard error is progress and log.
"""

# Heavy imports wait until a verb needs them.

import argparse
import contextlib
import functools
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from clients.user_code import unable_to_exit
from cloud_adapters.extras import naming_extras
from cloud_adapters.net.outbound import keep_loopback_direct
from deploy.cli import (
    audit_verb,
    baselines_verb,
    data_verb,
    enrolment_verbs,
    find_rate_verb,
    fleet_verbs,
    model_verbs,
    new_verb,
    owner_verbs,
    plan_verb,
    run_verbs,
    service_verbs,
    simulate_verb,
    tool_verbs,
    tune_verb,
    up_verb,
)
from deploy.cli.arguments import load_job
from deploy.cli.terminal import (
    complain,
    console,
    say,
    say_json,
    say_table,
    tell,
)
from deploy.cli.verb_table import Parser, parser_of
from deploy.cli.web import live_page
from deploy.exit_codes import DONE, FAILED, STOPPED
from deploy.service_log import keep_records_in_lines
from federation.clock import SystemClock
from privacy import own_folder

if TYPE_CHECKING:
    from federation.events import DataDistributed
    from federation.job.spec import JobSpec
    from monitoring.runs.run_folder import RunFolder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    options = _parser().parse_args(arguments)
    keep_records_in_lines()
    keep_loopback_direct(os.environ)
    options.clock = SystemClock()  # The only one of this process.
    try:
        # A user's own models and data are found from where the command is run.
        sys.path.append(os.getcwd())  # noqa: PTH109 -- sys.path holds texts
        # What a command leaves is for its own user.
        with own_folder.private_umask(), naming_extras():
            code = int(options.verb(options))
        # Here and not at the interpreter's end, where no error can be handled.
        sys.stdout.flush()
    except KeyboardInterrupt:
        tell("interrupted")
        return STOPPED
    except BrokenPipeError:
        # The reader of our output has gone, for example `crossfed runs | head`.
        _forget_output()
        return FAILED
    except Exception as error:  # noqa: BLE001 -- the last place that can explain it
        return complain(error, options)
    return code


def _forget_output() -> None:
    """Discard buffered output when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def _check_job(options: argparse.Namespace) -> int:
    job = load_job(options)
    from clients.models import tokenizers  # noqa: PLC0415 -- imports torch
    from clients.models.starting_weights import initial_weights  # noqa: PLC0415
    from clients.training.first_batch import check_first_batches  # noqa: PLC0415
    from deploy.cli import job_check  # noqa: PLC0415 -- imports torch
    from deploy.wiring import parts as wiring  # noqa: PLC0415 -- imports torch
    from federation.job import job_file  # noqa: PLC0415
    from monitoring.runs.find import runs_root  # noqa: PLC0415 -- imports torch
    from monitoring.terminal.data_table import data_table  # noqa: PLC0415

    runs_root(job)  # It refuses a storage.url that names no place.
    if lacking := wiring.without_data(job):
        return _check_model(job, lacking)
    with unable_to_exit(), wiring.torch_threads(job):
        with tokenizers.noted_tokenizers() as loaded:
            federation = wiring.build_federation(job)
        initial_weights(job, federation.pool)
        wiring.rule_of(job)
        wiring.cohorts_of(job)
        found = job_check.forecast(federation, options.clock, options.speeds)
        num_read, num_records = check_first_batches(federation)
    dealt = wiring.data_distributed(federation, at=options.clock.now())
    size, own = federation.pool.layout.size, federation.pool.layout.num_personal
    if options.json:
        sites = _site_rows(dealt)
        document: dict[str, Any] = {"job": job_file.document(job)}
        document |= {"sites": sites, "parameters": size, **found.document()}
        document |= {"records": num_records, "records_read": num_read}
        say_json(document)
        return DONE
    output = console()
    output.print(data_table(dealt, columns=output.width))
    _say_size(job, size)
    if own:
        say(f"each site trains {own:,} values more for itself (model.personal)")
    for line in found.lines():
        say(line)
    if advice := tokenizers.notice(job, loaded):
        say(advice)
    if num_read < num_records:
        say(f"looked for NaN in {num_read:,} of {num_records:,} records")
    say("the job is sound")
    return DONE


def _check_model(job: "JobSpec", elsewhere: Sequence[str]) -> int:
    """Check what can be checked of a job whose data only deployed sites can load."""
    from clients.models.model_pool import ModelPool  # noqa: PLC0415 -- imports torch

    with unable_to_exit():
        _say_size(job, ModelPool(job).layout.size)
    say(
        f"{', '.join(elsewhere)} load data of their own (site.toml): bytes, privacy "
        "and records are checked when the job is submitted"
    )
    return DONE


def _say_size(job: "JobSpec", size: int) -> None:
    from federation.job.statistics_checks import planned_rounds  # noqa: PLC0415 -- keeps `--help` fast

    rounds, sites = planned_rounds(job), len(job.sites)
    say(f"{job.name}: {rounds} rounds, {sites} sites, {size:,} values")


def _site_rows(dealt: "DataDistributed") -> list[dict[str, Any]]:
    return [
        {
            "site": share.site,
            "cloud": share.cloud,
            "region": share.region,
            "train_examples": share.train_examples,
            "held_out_examples": share.held_out_examples,
            "label_kind": dealt.label_kind,
            "counts": dict(zip(dealt.labels, share.counts, strict=False)),
        }
        for share in dealt.shares
    ]


def _report(options: argparse.Namespace) -> int:
    from monitoring.runs.find import find_run, find_runs  # noqa: PLC0415
    from monitoring.runs.run_folder import leave_comparison, leave_report, leave_sweep  # noqa: PLC0415

    if options.sweep is not None:
        out = options.out or options.sweep / "figures"
        drawn = [str(path) for path in leave_sweep(find_runs(options.sweep), out)]
        if options.json:
            say_json({"figures": drawn})
        for each in () if options.json else drawn:
            say(each)
        return DONE
    runs = [find_run(name, options.root) for name in options.run]
    # The same run by two names is one run.
    runs = list({run.path.resolve(): run for run in runs}.values())
    if len(runs) == 1:
        path = leave_report(runs[0], options.out)
    else:
        path = leave_comparison(runs, options.out)
    if options.json:
        say_json({"report": str(path), "plans": [*map(_compared, runs)]})
    else:
        say(str(path))
    return DONE


def _compared(run: "RunFolder") -> dict[str, Any]:
    """What was predicted of a run, and what it took."""
    from monitoring.views import run_plan  # noqa: PLC0415 -- keeps `--help` fast

    rows = run_plan.rows(run_plan.read(run.path), run.settled_view())
    return {
        "folder": str(run.path),
        "rows": [
            {
                "unit": row.unit,
                "what": row.what,
                "predicted": list(row.predicted),
                "actual": row.actual,
            }
            for row in rows
        ],
    }


def _runs(options: argparse.Namespace) -> int:
    from deploy.aggregator_host.run_list import by_time, shown, summary  # noqa: PLC0415
    from deploy.tools.ledger_reader import site_runs  # noqa: PLC0415
    from monitoring.runs.find import find_runs  # noqa: PLC0415

    rows = [summary(run) for run in find_runs(options.root)]
    rows.sort(key=by_time)
    if options.json:
        say_json(rows)
    elif rows:
        names = ("run", "job", "status", "rounds", "loss", "accuracy", "folder")
        say_table(names, (_cells(row) for row in rows))
        for row in rows:
            if "error" in row:
                tell(row["error"])
    elif ids := site_runs(options.root):
        tell(
            f"{options.root} belongs to a site, which stores no results of runs. See "
            f"its ledgers with crossfed ledger RUN --config FILE, for {', '.join(ids)}"
        )
    else:
        tell(f"there are no runs in {options.root}")
    with live_page(options, lambda: shown(options.root, {})):
        if options.web:
            _until_interrupted()
    return DONE


def _until_interrupted() -> None:
    with contextlib.suppress(KeyboardInterrupt):
        threading.Event().wait()


def _cells(row: dict[str, Any]) -> Sequence[str]:
    from monitoring import units  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.privacy_words import NOISY  # noqa: PLC0415

    loss, accuracy = row.get("loss"), row.get("accuracy")
    noisy = NOISY if row.get("is_noisy") else ""
    return (
        row["run_id"],
        row["job"],
        row["status"],
        f"{row.get('rounds_completed', '?')}/{row.get('rounds', '?')}",
        "" if loss is None else noisy + units.format_number(loss),
        "" if accuracy is None else f"{noisy}{accuracy:.1%}",
        row["folder"],
    )


_MODULES = (
    audit_verb,
    baselines_verb,
    data_verb,
    enrolment_verbs,
    find_rate_verb,
    fleet_verbs,
    model_verbs,
    new_verb,
    owner_verbs,
    plan_verb,
    run_verbs,
    service_verbs,
    simulate_verb,
    tool_verbs,
    tune_verb,
    up_verb,
)


@functools.cache  # Tests and notebooks run many commands in one process.
def _parser() -> Parser:
    does = {
        "check-job": _check_job,
        "completion": _completion,
        "report": _report,
        "runs": _runs,
    }
    for module in _MODULES:
        does |= module.VERBS
    return parser_of(does)


def _completion(options: argparse.Namespace) -> int:
    import shtab  # noqa: PLC0415 -- keeps `--help` fast

    say(shtab.complete(_parser(), options.shell))
    return DONE
