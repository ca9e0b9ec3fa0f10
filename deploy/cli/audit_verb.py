"""``crossfed audit``: arguments in, an audit's findings and its two files out."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from clients.user_code import unable_to_exit
from deploy.cli.arguments import load_job
from deploy.cli.terminal import say, say_json, tell
from deploy.exit_codes import DONE, FAILED, INCONCLUSIVE
from federation.epsilon_text import format_epsilon
from federation.errors import RunConflict, StoreUnavailable, os_errors

if TYPE_CHECKING:
    from federation.events import Event
    from federation.job.spec import JobSpec
    from monitoring.audit_findings import AuditFindings

ROOT = Path("audits")

_Number = TypeVar("_Number", int, float)


def _audit(options: argparse.Namespace) -> int:
    job = load_job(options)
    from deploy.audit import audit, runs as audit_runs  # noqa: PLC0415 -- imports torch

    attack = audit_runs.Attack(
        sites=tuple(dict.fromkeys(options.site)),
        canaries=_given(options.canaries, audit_runs.DEFAULT_CANARIES),
        confidence=_given(options.confidence, audit_runs.DEFAULT_CONFIDENCE),
    )
    folder = _folder(job, options)
    with unable_to_exit(), _progress() as listen:
        findings = audit.audit(job, attack, listeners=[listen], clock=options.clock)
    leave(findings, folder)
    return show(findings, folder, as_json=options.json)


def show(findings: "AuditFindings", folder: Path, *, as_json: bool) -> int:
    """Print what an audit found, and return the exit code.

    Args:
        findings: What was found.
        folder: Where it was left.
        as_json: Print the content of ``audit.json``.
    """
    from monitoring.audit_findings import document, format_p, lines  # noqa: PLC0415

    if as_json:
        say_json({**document(findings), "folder": str(folder)})
    else:
        for line in lines(findings):
            say(line)
        say(f"\nreport       {folder / 'audit.html'}")
    sys.stdout.flush()
    for site in findings.broken:
        epsilon = format_epsilon(site.promise.epsilon)
        tell(
            f"site {site.site!r} reports epsilon {epsilon}, but the "
            "attack succeeds more often than that allows (p-value "
            f"{format_p(site.p_value)}): the guarantee does not hold. Stop releasing "
            "its models, and find out what weakens noise or clipping"
        )
    for site in findings.inconclusive:
        epsilon = format_epsilon(site.promise.epsilon)
        tell(
            f"site {site.site!r} reports epsilon {epsilon}, and this "
            "audit would not notice missing noise, so it says nothing about the "
            "guarantee. Use more --canaries, or audit the same code at a smaller "
            "target_epsilon"
        )
    if findings.broken:
        return FAILED
    return INCONCLUSIVE if findings.inconclusive else DONE


def _given(value: _Number | None, default: _Number) -> _Number:
    return default if value is None else value


def _folder(job: "JobSpec", options: argparse.Namespace) -> Path:
    """Choose the audit's folder, which must be new or empty."""
    from federation.ids import new_run_id  # noqa: PLC0415

    name = new_run_id(options.clock.now(), os.urandom(3))
    folder: Path = options.out or ROOT / job.name / name
    with os_errors(StoreUnavailable, f"read {folder}"):
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    if taken:
        raise RunConflict(
            f"{folder} is not empty: an audit needs an empty folder; choose another "
            "with --out"
        )
    return folder


def leave(findings: "AuditFindings", folder: Path) -> None:
    """Write ``audit.json`` and ``audit.html`` into a folder, which is made.

    Raises:
        StoreUnavailable: They cannot be written.
    """
    from monitoring.audit_findings import document  # noqa: PLC0415
    from monitoring.pages.audit_page import write_audit  # noqa: PLC0415 -- slow to import

    text = json.dumps(document(findings), indent=2, allow_nan=False) + "\n"
    with os_errors(StoreUnavailable, f"write the audit into {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "audit.json").write_text(text, encoding="utf-8")
    write_audit(findings, folder / "audit.html")


@contextmanager
def _progress() -> Iterator[Callable[["Event"], None]]:
    """Report the progress of both runs on standard error."""
    from federation.events import RoundFinished, RunStarted  # noqa: PLC0415

    runs = iter(("with canaries", "without canaries"))
    total = 0

    def listen(event: "Event") -> None:
        nonlocal total
        if isinstance(event, RunStarted):
            total = event.rounds
            tell(f"run {next(runs, '')}, {total} rounds")
        elif isinstance(event, RoundFinished) and event.round_index % _step(total) == 0:
            tell(f"  round {event.round_index} of {total}")

    yield listen


def _step(rounds: int) -> int:
    """About ten lines for a run."""
    return max(1, rounds // 10)


VERBS = {
    "audit": _audit,
}
