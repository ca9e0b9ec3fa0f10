"""Verbs about the owners of runs: ``crossfed aggregator owners``."""

import argparse
import os
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from deploy import audit_log
from deploy.cli.terminal import say, say_json, say_table, tell
from deploy.exit_codes import DONE
from federation.errors import JobError

if TYPE_CHECKING:
    from deploy.aggregator_host.owners import Owner

_NONE = "none"  # In place of a limit: there is none from now on.


def _add(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import (  # noqa: PLC0415 -- keeps `--help` fast
        config as aggregator_file,
        enrolment_operator,
        owners,
    )
    from deploy.aggregator_host.owners import Owner, Usage  # noqa: PLC0415 -- as above

    config = aggregator_file.load(options.config)
    about = {"weight": options.weight, "max_priority": options.max_priority}
    given: dict[str, Any] = {
        k: value for k, value in about.items() if value is not None
    }
    quota = _quota(options.quota)
    owners.check_settings(options.name, **given, quota=Usage(**quota))
    token = enrolment_operator.new_token(
        config, options.name, random_bytes=os.urandom, clock=options.clock
    )

    def changed(before: "Owner | None") -> "Owner":
        known = before or Owner(name=options.name, token=token.digest)
        if not (known.token or given or quota):  # Else a larger quota would reopen it.
            known = replace(known, token=token.digest)
        return replace(known, **given, quota=replace(known.quota, **quota))

    noted = {key: str(value) for key, value in given.items()}
    if quota:
        noted["quota"] = ", ".join(f"{k}={_limit(v)}" for k, v in quota.items())
    now = options.clock.now()
    audit_log.note(config.folder, "owner.add", options.name, at=now, **noted)
    made = owners.change(config.folder, options.name, changed)
    is_new = made.token == token.digest
    if options.json:
        say_json({"owner": made.name, "token": token.text if is_new else None})
    elif is_new:
        say(token.text)
    if is_new:
        tell(
            f"for owner {made.name}: send it over a private channel. It is shown once; "
            "crossfed aggregator owners revoke ends it, and add alone makes another"
        )
    elif not made.token:
        tell(
            f"the token of owner {made.name} stays revoked: crossfed aggregator owners "
            f"add {made.name}, without settings, makes another"
        )
    return DONE


def _limit(value: float | None) -> str:
    return _NONE if value is None else f"{value:g}"


def _quota(settings: list[str]) -> dict[str, float | None]:
    """The limits that are named; None of one that is to be dropped."""
    from deploy.aggregator_host.owners import Usage  # noqa: PLC0415 -- keeps `--help` fast

    known, found = [field.name for field in fields(Usage)], dict[str, float | None]()
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            limit = None if text == _NONE else float(text)
        except ValueError:
            limit = -1.0
        if name not in known or not 0 <= (limit or 0.0) < float("inf"):
            raise JobError(
                f"{setting!r} is no quota: write one of {', '.join(known)}, and its "
                f"limit, such as site_hours=100, or {_NONE}",
                key="--quota",
            )
        found[name] = limit
    return found


def _list(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import (  # noqa: PLC0415 -- keeps `--help` fast
        admission,
        config as aggregator_file,
        owners,
        run_queue,
    )

    config, now = aggregator_file.load(options.config), options.clock.now()
    runs = run_queue.handed_over(config.runs).runs
    rows: list[dict[str, Any]] = [
        {
            "owner": one.name,
            "weight": one.weight,
            "max_priority": one.max_priority,
            "token": "valid" if one.token else "revoked",
            "quota": asdict(one.quota),
            "used": asdict(admission.usage(config, runs, one.name, now)),
        }
        for one in owners.read(config.folder).owners
    ]
    if options.json:
        say_json(rows)
        return DONE
    for row in rows:
        for what, limit in row.pop("quota").items():
            most = "" if limit is None else f" of {limit:g}"
            used = row["used"][what]
            row[what] = "unknown" if used is None else f"{used:.4g}{most}"
        del row["used"]
    names = [*rows[0]] if rows else ["owner"]
    say_table(names, ([f"{row[name]}" for name in names] for row in rows))
    return DONE


def _revoke(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file, owners  # noqa: PLC0415

    config = aggregator_file.load(options.config)

    def revoked(before: "Owner | None") -> "Owner":
        if before is None:
            raise JobError(f"there is no owner {options.name!r}", key="name")
        return replace(before, token="")

    now = options.clock.now()
    audit_log.note(config.folder, "owner.revoke", options.name, at=now)
    owners.change(config.folder, options.name, revoked)
    if options.json:
        say_json({"owner": options.name, "token": None})
    tell(
        f"the token of owner {options.name} is revoked. Its runs go on: crossfed stop "
        "RUN ends one"
    )
    return DONE


VERBS = {
    "aggregator owners add": _add,
    "aggregator owners list": _list,
    "aggregator owners revoke": _revoke,
}
