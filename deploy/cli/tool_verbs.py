"""Verbs of the command line besides runs: keys, doctor, transcript, ledger, storage.

Arguments in and text out; the work is in the modules of the same names.
"""

import argparse
import os
import re
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import key, service
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE, FAILED
from federation.errors import JobError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from deploy.tools.rewrap import Place

_DIGEST = re.compile("[0-9a-f]{64}")


def _new_key(options: argparse.Namespace) -> int:
    from privacy.membership import key_files as keys  # noqa: PLC0415 -- keeps `--help` fast

    made = keys.new(
        options.name,
        random_bytes=os.urandom,
        out=options.out,
        passphrase_file=options.passphrase_file,
    )
    _print_facts({"name": options.name, **asdict(made)}, options)
    if not made.encrypted:
        tell(f"{made.file} is not encrypted; --passphrase-file encrypts a new key")
    return DONE


def _show_key(options: argparse.Namespace) -> int:
    from privacy.membership import key_files as keys  # noqa: PLC0415 -- keeps `--help` fast

    found = keys.show(options.file, passphrase_file=options.passphrase_file)
    _print_facts(asdict(found), options)
    return DONE


def _storage_key(options: argparse.Namespace) -> int:
    from cloud_adapters.keys import key_file  # noqa: PLC0415 -- keeps `--help` fast

    key_id = key_file.add_key(options.file)
    found = key_file.read_keys(options.file)
    facts = {"file": str(options.file), "key": key_id, "keys": len(found)}
    _print_facts(facts, options)
    tell(
        f"if you lose {options.file}, you lose everything encrypted with it: keep a "
        "copy elsewhere"
    )
    return DONE


def _trust_key(options: argparse.Namespace) -> int:
    from deploy import audit_log  # noqa: PLC0415 -- keeps `--help` fast
    from privacy.membership import roster_file  # noqa: PLC0415 -- as above
    from privacy.secagg.agreement import roster  # noqa: PLC0415

    folder, whom = options.roster.parent, options.relay or options.site or "aggregator"
    if (folder / audit_log.FILE).exists():  # A party's; others are drafts.
        now = options.clock.now()
        audit_log.note(folder, "roster.trust", whom, at=now, key=options.key)
    trusted = roster_file.trust(
        options.roster,
        site=None if options.aggregator else options.relay or options.site,
        role=roster.RELAY if options.relay else roster.SITE,
        organisation=options.organisation,
        key=options.key,
        replace=options.replace,
    )
    _print_facts(asdict(trusted), options)
    if not trusted.changed:
        tell(f"{trusted.roster} already pins this: nothing has changed")
    for part in trusted.missing:
        way = "--aggregator" if part == "aggregator" else "--site"
        tell(
            f"{trusted.roster} is a draft without {part}: add it with `crossfed keys "
            f"trust ... {way}`"
        )
    return DONE


def _audit_log(options: argparse.Namespace) -> int:
    from deploy import audit_log  # noqa: PLC0415 -- keeps `--help` fast

    known, faults = list[str](), list[str]()
    for each in options.known:
        if _DIGEST.fullmatch(each):
            known.append(each)
            continue
        other = audit_log.read(Path(each))
        known += audit_log.heads(other.entries)
        faults += [f"{each}: {fault}" for fault in other.faults]
    found = audit_log.read(options.file, known)
    faults += [f"{options.file}: {fault}" for fault in found.faults]
    if options.json:
        entries = [asdict(entry) for entry in found.entries]
        say_json({"entries": entries, "head": found.head, "faults": faults})
    else:
        rows = [
            [
                str(entry.number),
                f"{datetime.fromtimestamp(entry.at, UTC):%Y-%m-%d %H:%M:%S}",
                *(entry.who, entry.action, entry.subject),
                ", ".join(f"{k} {v}" for k, v in entry.details.items() if v),
            ]
            for entry in found.entries
        ]
        names = ["entry", "time (UTC)", "who", "action", "subject", "details"]
        say_table(names, rows, cut="details")
        good = f"digest of the last: {found.head}"
        said = "the log is not as it was written" if faults else good
        number = len(found.entries)
        say(f"{number:,} {'entry' if number == 1 else 'entries'}, {said}")
    for fault in faults:
        tell(fault)
    return FAILED if faults else DONE


def _doctor(options: argparse.Namespace) -> int:
    from deploy.doctor import checks as doctor, identities  # noqa: PLC0415 -- imports torch
    from federation.job import job_file  # noqa: PLC0415

    is_own = not options.endpoint
    needs = [
        need
        for url in options.store
        for need in identities.needs_of_url(url, is_own=is_own)
    ]
    if options.job is not None:
        needs += identities.needs_of_job(job_file.load(options.job))
    checks = [
        *doctor.examine(
            key=options.key,
            roster_file=options.roster,
            runs=Path("runs"),
            clock=options.clock,
        ),
        *identities.checks(needs),
    ]
    if options.store and not options.identity_only:
        from deploy.doctor import store as doctor_store  # noqa: PLC0415 -- slow to import

        for url in options.store:
            checks += doctor_store.checks(url, service(options))
    if options.site is not None:
        from deploy.doctor import site as doctor_site  # noqa: PLC0415 -- imports TLS

        checks += doctor_site.checks(options.site, options.clock)
    if options.aggregator is not None:
        from deploy.doctor import aggregator as doctor_aggregator  # noqa: PLC0415 -- imports TLS

        checks += doctor_aggregator.checks(options.aggregator, options.clock)
    problems = sum(check.status == "problem" for check in checks)
    if options.json:
        say_json({"checks": [asdict(c) for c in checks], "problems": problems})
    else:
        for check in checks:
            advice = f"; {check.advice}" if check.advice else ""
            say(f"{check.status:<8} {check.name}: {check.found}{advice}")
    return FAILED if problems else DONE


def _transcript(options: argparse.Namespace) -> int:
    from deploy.tools import transcript_reader as transcript  # noqa: PLC0415 -- keeps `--help` fast

    if options.message is not None:
        found = transcript.find(options.folder, options.message)
        if options.json:
            say_json(found)
        else:
            say("\n".join(transcript.lines(found, fields=True)))
        return DONE
    messages = transcript.read(options.folder)
    if options.json:
        say_json(list(messages))
        return DONE
    summary = transcript.Summary()
    for message in messages:
        summary.add(message)
        for line in transcript.lines(message):
            say(line)
    for line in summary.lines():
        say(line)
    return DONE


def _recover(options: argparse.Namespace) -> int:
    from deploy.tools import ledger_recovery  # noqa: PLC0415 -- imports torch

    if options.config is None:
        found = ledger_recovery.in_simulation(
            options.run, options.root, clock=options.clock
        )
    else:
        found = ledger_recovery.at_site(
            options.config, options.run, clock=options.clock, listener=tell
        )
    if options.json:
        say_json({"recovered": [ledger_recovery.facts(each) for each in found]})
        return DONE
    for number, each in enumerate(found):
        if number:
            say("")
        for line in ledger_recovery.lines(each):
            say(line)
    return DONE


def _ledger(options: argparse.Namespace) -> int:
    from deploy.tools import ledger_reader as ledger  # noqa: PLC0415 -- imports torch

    if options.action == "recover" and options.run is not None:
        return _recover(options)
    if options.action is not None and options.run is not None:
        raise JobError(f"ledger {options.action} is unknown: write ledger recover RUN")
    name = options.action  # A single word names a run.
    with ExitStack() as stack:
        root, key = options.root, None
        if options.config is not None:
            site = ledger.of_site(options.config, tell)
            root, key = stack.enter_context(site)
        paths = ledger.find(name or ledger.only_run(root), root)
        findings = [ledger.examine(path, key) for path in paths]
    damaged = sum(finding.contents is None for finding in findings)
    if options.json:
        known = [ledger.facts(finding) for finding in findings]
        say_json({"ledgers": known, "damaged": damaged})
    else:
        for number, finding in enumerate(findings):
            if number:
                say("")
            for line in ledger.lines(finding):
                say(line)
    return FAILED if damaged else DONE


def _print_facts(facts: dict[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        say_json(facts)
        return
    shown = {k: v for k, v in facts.items() if isinstance(v, (str, int))}
    for name, value in shown.items():
        text = str(value).lower() if isinstance(value, bool) else value
        say(f"{name.replace('_', ' '):<11}  {text}")


def _rewrap(options: argparse.Namespace) -> int:
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch
    from deploy.wiring.encryption import KeyName  # noqa: PLC0415

    to = KeyName(name=options.to, endpoint=options.to_endpoint, argument="--to")
    with _opened_place(options, is_changed=True) as place:
        done = rewrap.rewrap(place, to=to)
    if options.json:
        say_json(rewrap.facts(done))
        return DONE
    say(done.url)
    say(f"{done.rewrapped:>8,}  rewrapped")
    say(f"{done.already:>8,}    already had the key")
    say(f"{done.changed:>8,}    were changed by others meanwhile, and left as they are")
    say(f"{done.in_clear:>8,}  are not encrypted")
    return DONE


def _decrypt(options: argparse.Namespace) -> int:
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch

    with _opened_place(options, is_changed=False) as place:
        written = rewrap.decrypt(place, options.out)
    if options.json:
        say_json({"folder": str(options.out), "bytes": written})
    else:
        for name, size in written.items():
            say(f"{size:>12,}  {options.out / name}")
    return DONE


def _opened_place(
    options: argparse.Namespace, *, is_changed: bool
) -> "AbstractContextManager[Place]":
    from deploy.tools import rewrap  # noqa: PLC0415 -- imports torch

    if options.place == "memory://":
        raise JobError("memory:// disappears when this command ends", key="PLACE")
    return rewrap.opened(
        options.place,
        options.root,
        key=key(options),
        service=service(options),
        is_changed=is_changed,
    )


VERBS = {
    "keys new": _new_key,
    "keys show": _show_key,
    "keys storage": _storage_key,
    "keys trust": _trust_key,
    "doctor": _doctor,
    "audit-log": _audit_log,
    "transcript": _transcript,
    "ledger": _ledger,
    "storage rewrap": _rewrap,
    "storage decrypt": _decrypt,
}
