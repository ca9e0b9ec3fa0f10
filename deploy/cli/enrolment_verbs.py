"""Verbs of the command line about a site's membership: enroll, invite, revoke, sites.

Arguments in and text out; the work is in ``enrolment_site`` and ``enrolment_operator``.
"""

import argparse
import contextlib
import os
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from getpass import getpass
from typing import TYPE_CHECKING

from deploy.cli.terminal import note, say, say_json, tell
from deploy.exit_codes import DONE
from federation.errors import FederationError, JobError
from monitoring.units import format_duration, format_number

if TYPE_CHECKING:
    from deploy.aggregator_host.config import AggregatorConfig
    from deploy.aggregator_host.enrolment_operator import SiteRow
    from deploy.site_host.enrol import SiteEnrolled
    from federation.platform_identity import PlatformIdentity
    from privacy.membership.token import Token

_STANDARD_INPUT, _MOST_TOKEN_CHARS = "-", 1024
# What the time of a row of ``crossfed aggregator sites`` means.
_WHEN = {
    "invited": "the token holds until",
    "enrolled": "the certificate holds until",
    "revoked": "since",
}


def _enroll(options: argparse.Namespace) -> int:
    from deploy.site_host import enrol as enrolment_site  # noqa: PLC0415 -- keeps `--help` fast
    from privacy.membership.token import EnrolmentRefused, Token  # noqa: PLC0415

    if options.accept is not None and not options.roster:
        raise JobError("needs --roster", key="--accept")
    if options.roster:
        return _roster(options)
    if options.renew:
        config = enrolment_site.config_of(options.folder)
        _print_enrolled(enrolment_site.renew(config, clock=options.clock), options)
        return DONE
    token = Token.parse(_token_text(options.token))
    if token.secret and options.token not in {None, _STANDARD_INPUT}:
        raise EnrolmentRefused(
            "this token has a secret, and all users of this machine can read a command "
            "line: have it revoked (crossfed aggregator revoke SITE), and enter a new "
            "one where this command asks for it"
        )
    if options.platform is not None:
        return _enroll_machine(token, options)
    found = enrolment_site.enroll(
        token,
        options.folder,
        organisation=options.organisation or token.site,
        clock=options.clock,
    )
    _print_enrolled(found, options)
    return DONE


def _token_text(argument: str | None) -> str:
    """The token of a command line, or what its reader enters instead."""
    if argument not in {None, _STANDARD_INPUT}:
        return argument
    if sys.stdin.isatty():
        return getpass("token: ")
    return sys.stdin.readline(_MOST_TOKEN_CHARS)


def _enroll_machine(token: "Token", options: argparse.Namespace) -> int:
    from cloud_adapters.identity import platforms  # noqa: PLC0415 -- keeps `--help` fast
    from deploy.site_host import enrol, enrolment_machine  # noqa: PLC0415
    from federation.platform_identity import AWS  # noqa: PLC0415

    region = options.region or os.environ.get("AWS_REGION", "")
    if options.platform == AWS and not region:
        raise JobError("is missing, and AWS_REGION is not set", key="--region")
    found = enrolment_machine.enroll_machine(
        token,
        options.folder,
        organisation=options.organisation or token.site,
        platform=options.platform,
        prove=platforms.prover(options.platform, region, tell),
        clock=options.clock,
        listener=note,
    )
    signed = bool(enrol.config_of(options.folder).file.roster_signer)
    if found is not None and not signed:
        _print_enrolled(found, options)
    elif options.json:
        say_json({"site": token.site, "folder": str(options.folder)})
    else:
        what = ", and its operator has signed whom it trusts" if signed else ""
        say(f"site {token.site} is enrolled{what}")
    return DONE


def _roster(options: argparse.Namespace) -> int:
    from deploy.site_host import enrol as enrolment_site, enrolment_roster  # noqa: PLC0415
    from privacy.secagg.agreement import roster  # noqa: PLC0415

    config = enrolment_site.config_of(options.folder)
    newest = enrolment_site.newest_roster(config, clock=options.clock)
    changes = enrolment_roster.differences(roster.load(config.roster), newest)
    if options.accept is not None:
        now = options.clock.now()
        enrolment_roster.accept_roster(config, newest, options.accept, at=now)
    digest = newest.digest.hex()
    facts = {
        "serial": newest.serial,
        "digest": digest,
        "changes": changes,
        "accepted": options.accept is not None,
    }
    if options.json:
        say_json(facts)
        return DONE
    say(f"roster {newest.serial}, digest {digest}")
    for change in changes or ["changes nothing"]:
        say(f"  {change}")
    if options.accept is not None:
        say(
            f"{config.roster} is replaced; a running agent uses it from the next run on"
        )
    elif changes:
        say(
            "compare the digest with what crossfed aggregator sites shows, and with "
            f"the other sites; then: crossfed enroll --folder {options.folder} "
            f"--roster --accept {digest}"
        )
    return DONE


def _print_enrolled(found: "SiteEnrolled", options: argparse.Namespace) -> None:
    facts = {
        "site": found.site,
        "folder": str(found.folder),
        "expires": _day(found.expires),
        "fingerprint": found.fingerprint,
        "roster": found.roster.serial,
        "digest": found.roster.digest.hex(),
        "newer_roster": None if found.newer is None else found.newer.serial,
    }
    if options.json:
        say_json(facts)
        return
    say(f"site {found.site} is enrolled; its certificate expires {facts['expires']}")
    say(f"fingerprint of this site: {found.fingerprint}")
    say(f"roster {found.roster.serial}, digest {facts['digest']}")
    for entry in found.roster.sites:
        say(f"  {entry.role} {entry.site}: {entry.organisation}")
    if found.newer is not None:
        say(
            f"the aggregator has roster {found.newer.serial}: crossfed enroll --roster "
            "shows what it changes"
        )
    if not options.renew:
        say(
            "compare fingerprint and digest with the aggregator's operator. If sites "
            "enrol after this one, accept the roster with all of them: crossfed enroll "
            f"--folder {found.folder} --roster"
        )
        say(f"then: crossfed site up --config {found.folder / 'site.toml'}")


def _invite(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file, enrolment_operator  # noqa: PLC0415
    from privacy.secagg.agreement import roster  # noqa: PLC0415

    clock = options.clock
    config, machine = aggregator_file.load(options.config), _machine(options)
    role = roster.RELAY if options.relay else roster.SITE
    about = {"clock": clock, "address": options.address, "role": role}
    seconds = 60.0 * options.minutes
    if machine is None:
        token = enrolment_operator.invite(
            config, options.site, random_bytes=os.urandom, seconds=seconds, **about
        )
    else:
        token = enrolment_operator.invite_machine(
            config, options.site, machine, seconds=seconds, **about
        )
    expires = clock.now() + seconds
    if not config.file.proxy:
        tell(aggregator_file.NO_PROXY)
    if options.json:
        facts = {"site": token.site, "token": token.text, "expires": _minute(expires)}
        say_json(facts)
        return DONE
    say(token.text)
    if machine is not None:
        where = f" --region {machine.region}" if machine.region else ""
        tell(
            f"for the machine {machine} as {token.site}, until {_minute(expires)}; the "
            "token is no secret. On the machine: crossfed enroll TOKEN --platform "
            f"{machine.platform}{where} --folder DIR"
        )
        return DONE
    tell(
        f"for {token.site}, once, until {_minute(expires)}; send it over a private "
        "channel. On the site's machine, crossfed enroll --folder DIR asks for it"
    )
    return DONE


def _machine(options: argparse.Namespace) -> "PlatformIdentity | None":
    """The machine that may enrol without a secret; None if a secret admits the site."""
    from federation import platform_identity  # noqa: PLC0415 -- keeps `--help` fast

    role, account = options.aws_role, options.gcp_service_account
    if role and account:
        raise JobError("excludes --aws-role", key="--gcp-service-account")
    try:
        if role:
            return platform_identity.of_role(
                role, region=options.region, instance=options.instance
            )
        if account:
            return platform_identity.of_service_account(
                account, project=options.project, instance=options.instance
            )
    except ValueError as error:
        option = "--aws-role" if role else "--gcp-service-account"
        raise JobError(str(error), key=option) from None
    return None


def _revoke(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file, enrolment_operator  # noqa: PLC0415

    config = aggregator_file.load(options.config)
    done = enrolment_operator.revoke(
        config,
        options.site,
        unregister=partial(_unregister, config),
        clock=options.clock,
    )
    if options.json:
        say_json(asdict(done))
        return DONE
    proxy = "the proxy refuses it" if done.proxy else "no proxy runs here"
    say(f"site {options.site} is revoked: {proxy}, and the roster's serial has risen")
    if done.still_registered is not None:
        tell(
            f"its node is still registered: {done.still_registered}; run this command "
            "again when the SuperLink is running"
        )
    return DONE


def _unregister(config: "AggregatorConfig", node_id: int) -> None:
    from deploy.aggregator_host import enrolment_nodes  # noqa: PLC0415 -- imports Flower

    enrolment_nodes.unregister(config, node_id)


def _sites(options: argparse.Namespace) -> int:
    from deploy.aggregator_host import config as aggregator_file, enrolment_operator  # noqa: PLC0415
    from federation import folder_lock  # noqa: PLC0415 -- keeps `--help` fast
    from monitoring.runs.find import find_runs  # noqa: PLC0415
    from monitoring.runs.numbers_reader import MAX_RUNS, NumbersReader  # noqa: PLC0415
    from privacy.secagg.agreement.roster import SITE  # noqa: PLC0415 -- imports NumPy

    config = aggregator_file.load(options.config)
    runs = [
        NumbersReader(run.events).look() for run in find_runs(config.runs)[-MAX_RUNS:]
    ]
    nodes = None
    if folder_lock.is_held(config.lock):
        from deploy.aggregator_host import enrolment_nodes  # noqa: PLC0415 -- imports Flower

        with contextlib.suppress(FederationError):  # The list is of use without them.
            nodes = enrolment_nodes.connected(config)
    found = enrolment_operator.overview(
        config, clock=options.clock, nodes=nodes, runs=runs
    )
    if options.json:
        say_json(asdict(found))
        return DONE
    for row in found.sites:
        about = ", ".join(filter(None, (row.organisation, row.release)))
        say(f"{row.state:<9} {row.role} {row.site}{': ' if about else ''}{about}")
        say(f"          {_WHEN[row.state]} {_minute(row.at)}")
        if row.connected is not None:
            say(f"          {'connected' if row.connected else 'not connected'}")
        if row.state == "enrolled" and row.role == SITE:
            say(f"          {_work(row, options.clock.now())}")
        if row.fingerprint:
            say(f"          fingerprint {row.fingerprint}")
    say(f"roster {found.serial}, digest {found.digest or 'none, it has no sites yet'}")
    return DONE


def _work(row: "SiteRow", now: float) -> str:
    """When a site answered a task last, and how fast it trains."""
    if row.last_answer is None:
        return "no answer in the newest runs"
    ago = format_duration(max(0.0, now - row.last_answer))
    speed = "-"  # The run hides it.
    if row.steps_per_second is not None:
        speed = format_number(row.steps_per_second)
    return f"last answer {ago} ago, {speed} steps a second"


def _day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d}"


def _minute(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


VERBS = {
    "aggregator invite": _invite,
    "aggregator revoke": _revoke,
    "aggregator sites": _sites,
    "enroll": _enroll,
}
