"""Finds what keeps this machine from taking part, before a run does.

Every check looks and changes nothing but a temporary file. What it finds is a line:
ok, a warning (it works, or would if asked otherwise), or a problem.
"""

import os
import platform
import shutil
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal, ParamSpec

from packaging.requirements import Requirement

from federation.errors import FederationError
from federation.protocols import Clock
from privacy import own_folder
from privacy.membership.key_files import is_encrypted
from privacy.membership.roster_file import describe
from privacy.secagg.agreement import identity, roster
from privacy.secagg.agreement.identity import PublicIdentity
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import KeyFileRefused, RosterRefused
from privacy.secret_files import MAX_KEY_FILE_BYTES

P = ParamSpec("P")
Status = Literal["ok", "warning", "problem"]

# A run of a small model leaves a few megabytes, and of a large one far more.
LITTLE_SPACE_BYTES = 1 << 30
NO_SPACE_BYTES = 64 << 20
CLOCK_TOLERANCE_SECONDS = 60.0

_EARLIEST = datetime(2026, 1, 1, tzinfo=UTC).timestamp()
_LATEST = datetime(2100, 1, 1, tzinfo=UTC).timestamp()
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH
_PRIVATE_MODE = 0o600
_PAIR = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One result of the doctor.

    Attributes:
        name: What was looked at.
        status: ``ok``, ``warning`` or ``problem``.
        found: What is the case.
        advice: What to do; empty if all is well.
    """

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str, advice: str = "") -> Check:
    """Report that something is as it should be."""
    return Check(name=name, status="ok", found=found, advice=advice)


def warning(name: str, found: str, advice: str = "") -> Check:
    """Report that something works, but deserves attention."""
    return Check(name=name, status="warning", found=found, advice=advice)


def problem(name: str, found: str, advice: str) -> Check:
    """Report that something keeps this machine from taking part."""
    return Check(name=name, status="problem", found=found, advice=advice)


def or_problem(
    name: str, advice: str
) -> Callable[[Callable[P, Iterator[Check]]], Callable[P, Iterator[Check]]]:
    """Turn an error that ends a check into its last result.

    Args:
        name: What is looked at.
        advice: What to do about any of its errors.
    """

    def made(check: Callable[P, Iterator[Check]]) -> Callable[P, Iterator[Check]]:
        def lines(*args: P.args, **kwargs: P.kwargs) -> Iterator[Check]:
            try:
                yield from check(*args, **kwargs)
            except FederationError as error:
                yield problem(name, str(error), advice)

        return lines

    return made


def examine(
    *, key: Path | None, roster_file: Path | None, runs: Path, clock: Clock
) -> list[Check]:
    """Check this machine and the given files.

    Args:
        key: A key file, or None.
        roster_file: A roster file, or None.
        runs: The folder of all runs, which need not exist.
        clock: This machine's.
    """
    checks = [*check_packages(installed_requirements()), *check_torch()]
    public = None
    if key is not None:
        found, public = check_key(key)
        checks += found
    if roster_file is not None:
        found, pinned = check_roster(roster_file)
        checks += found
        if public is not None and pinned is not None:
            checks.append(check_pinned(public, pinned))
    checks += check_folder("runs folder", runs, otherwise="choose another with --out")
    files = [path for path in (key, roster_file) if path is not None]
    return [*checks, check_clock(clock, [Path(__file__), *files])]


def installed_requirements() -> Sequence[Requirement] | None:
    """Requirements of the installed crossfed; None if it is not installed."""
    try:
        found = metadata.requires("crossfed") or []
    except metadata.PackageNotFoundError:
        return None
    return [Requirement(text) for text in found]


def check_packages(requirements: Sequence[Requirement] | None) -> Iterator[Check]:
    """Python and the packages that crossfed needs, and their versions."""
    yield ok("python", platform.python_version())
    if requirements is None:
        yield warning(
            "packages",
            "crossfed runs from its source tree and is not installed",
            "install it: python -m pip install crossfed",
        )
        return
    for each in sorted(requirements, key=lambda each: each.name):
        if each.marker is None:
            install = f"python -m pip install '{each.name}{each.specifier}'"
            yield _check_package(each, install)


def check_flower() -> Check:
    """Check Flower's package, which runs between machines need."""
    found = [x for x in installed_requirements() or () if x.name == "flwr"]
    needed = found[0] if found else Requirement("flwr")
    install = "python -m pip install 'crossfed[flower]'"
    return replace(_check_package(needed, install), name="flower")


def check_torch() -> Iterator[Check]:
    """Whether torch can be loaded, and on which device it computes."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            import torch  # noqa: PLC0415 -- what is checked

            names = [
                torch.cuda.get_device_name(at)
                for at in range(torch.cuda.device_count())
            ]
        except (ImportError, OSError, RuntimeError) as error:
            yield problem(
                "torch",
                f"it cannot be loaded: {_line(error)}",
                "reinstall torch for this machine's driver",
            )
            return
    if said and not names:
        yield warning(
            "cuda",
            _line(said[-1].message),
            "fix the driver if sites are to train on a GPU",
        )
    else:
        found = ", ".join(names) or "none: sites train on the CPU"
        yield ok("cuda", found)


def check_key(path: Path) -> tuple[list[Check], PublicIdentity | None]:
    """A key file: owner, mode, encryption, and whether it is a key at all.

    Returns:
        The lines, and the public half if no passphrase is needed.
    """
    try:
        status, pem = _look(path)
    except OSError as error:
        return [_bad_key(path, error.strerror or str(error))], None
    if pem is None:
        return [_bad_key(path, "it is not a regular file")], None
    exposed = list(_key_exposure(path, status))
    if b"PRIVATE KEY-----" not in pem or len(pem) > MAX_KEY_FILE_BYTES:
        return [*exposed, _bad_key(path, "it contains no private key")], None
    if is_encrypted(pem):
        return [*exposed, ok("key", f"{path} is encrypted")], None
    checks = [
        *exposed,
        warning(
            "key",
            f"{path} is not encrypted: anyone who copies the file has the key",
            "make a new one with `crossfed keys new --passphrase-file`, or keep "
            "the file on an encrypted disk",
        ),
    ]
    public = None
    if not exposed:  # Otherwise it would be refused for what is said already.
        try:
            public = identity.load(path).public
        except KeyFileRefused as error:
            checks.append(_bad_key(path, str(error)))
    return checks, public


def check_identity(key: Path, roster_file: Path, *, lost: str) -> Iterator[Check]:
    """The key of a service, and whether its roster pins it.

    A service has no one to type a passphrase, and refuses a key that is open to others.

    Args:
        key: Its key file.
        roster_file: Roster that should pin the public key.
        lost: What to do if there is no such key.
    """
    public = None
    try:
        public = identity.load(key).public
    except KeyFileRefused as error:
        advice = f"{lost}; a key that needs a passphrase cannot be used here"
        yield problem("key", str(error), advice)
    else:
        yield ok("key", str(key))
    found, pinned = check_roster(roster_file)
    yield from found
    if public is not None and pinned is not None:
        yield check_pinned(public, pinned)


def check_roster(path: Path) -> tuple[list[Check], Roster | None]:
    """A roster file: readable, consistent, and writable only by its owner."""
    try:
        serial, digest = describe(path)
        if serial and not digest:
            draft = f"{path} is a draft that pins no site yet"
            advice = "invite sites, or pin them with `crossfed keys trust`"
            return [warning("roster", draft, advice)], None
        found = roster.load(path)
        mode = stat.S_IMODE(path.stat().st_mode)
    except (RosterRefused, OSError) as error:
        advice = "get the newest roster, or create one with `crossfed keys trust`"
        return [problem("roster", str(error), advice)], None
    checks = [
        ok(
            "roster",
            f"{path} has serial {found.serial}, {len(found.sites)} site(s) and "
            f"the digest {found.digest.hex()}",
            "compare serial and digest with those of the other sites",
        )
    ]
    if mode & _OTHERS_MAY_WRITE:
        checks.append(
            warning(
                "roster",
                f"{path} has mode {mode:04o}: other users can change whom you trust",
                f"chmod go-w {path}",
            )
        )
    if len(found.sites) < _PAIR:
        checks.append(
            warning(
                "roster",
                f"{path} has one site, and secure aggregation needs two",
                "invite the others; a site then gets the newest roster with "
                "`crossfed enroll --roster`",
            )
        )
    return checks, found


def check_pinned(public: PublicIdentity, pinned: Roster) -> Check:
    """Whether the roster knows the key."""
    if public.key == pinned.aggregator_key:
        return ok("trust", "the key is the aggregator's")
    for entry in pinned.sites:
        if public.key == entry.public_key:
            return ok("trust", f"the key is that of site {entry.site!r}")
    return problem(
        "trust",
        f"roster {pinned.serial} does not pin the key {public.fingerprint[:19]}...",
        "pin it with `crossfed keys trust`, or use another key",
    )


def check_closed(folder: Path) -> Iterator[Check]:
    """Whether other users of the host are kept out of a service's folder."""
    try:
        is_open, mode = own_folder.is_open(folder), stat.S_IMODE(folder.stat().st_mode)
    except OSError:
        return  # It is not there, which others say.
    if is_open:
        yield problem(
            "folder mode",
            f"other users can enter {folder} (mode {mode:04o})",
            f"chmod 0700 {folder}, or start the service, which does it",
        )
    else:
        yield ok("folder mode", f"{folder} is closed to other users")


def check_folder(name: str, folder: Path, *, otherwise: str) -> Iterator[Check]:
    """A folder, or where it would be made: writable, and space.

    Args:
        name: What it is called.
        folder: It need not exist.
        otherwise: What to do if it cannot be made to serve.
    """
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"?")
        free = shutil.disk_usage(place).free
    except OSError as error:
        yield problem(
            name,
            f"cannot write in {place}: {error.strerror}",
            f"make it writable for this user, or {otherwise}",
        )
        return
    yield ok(name, f"{place} is writable")
    yield _check_space(place, free, otherwise)


def check_clock(clock: Clock, files: Iterable[Path]) -> Check:
    """Whether the clock can be right: not before the time of existing files."""
    now = clock.now()
    newest = max((_modified(path), path) for path in files)
    advice = "set the clock, for example by NTP"
    if not _EARLIEST <= now <= _LATEST:
        return problem("clock", f"it shows {_date(now)}, which is impossible", advice)
    ahead = newest[0] - now
    if ahead > CLOCK_TOLERANCE_SECONDS:
        found = f"it is {ahead:.0f} s behind the date of {newest[1]}"
        return warning("clock", found, advice)
    return ok("clock", _date(now))


def _check_package(requirement: Requirement, install: str) -> Check:
    name, specifier = requirement.name, requirement.specifier
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return problem(name, "it is not installed", install)
    if not specifier.contains(version, prereleases=True):
        return problem(name, f"{version} is not {specifier}", install)
    return ok(name, version)


def _look(path: Path) -> tuple[os.stat_result, bytes | None]:
    """State and content of a key file, without blocking on a pipe."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return status, None
    with path.open("rb") as file:
        return status, file.read(MAX_KEY_FILE_BYTES + 1)


def _key_exposure(path: Path, status: os.stat_result) -> Iterator[Check]:
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid():
        yield warning(
            "key",
            f"{path} belongs to user {status.st_uid}, not to this one "
            f"({os.geteuid()}): crossfed will not use it",
            "run as its owner, or create your own key with `crossfed keys new`",
        )
    if mode != _PRIVATE_MODE:
        yield warning(
            "key",
            f"{path} has mode {mode:04o}, not 0600",
            f"chmod 600 {path}; if anyone else had access, make a new key",
        )


def _bad_key(path: Path, text: str) -> Check:
    where = "" if str(path) in text else f"{path}: "
    return problem(
        "key",
        f"{where}{text}",
        "create a key with `crossfed keys new`, or give another file with --key",
    )


def _check_space(place: Path, free: int, otherwise: str) -> Check:
    text = f"{free / 1e9:,.1f} GB are free in {place}"
    advice = f"free some space, or {otherwise}"
    if free < NO_SPACE_BYTES:
        return problem("space", text, advice)
    if free < LITTLE_SPACE_BYTES:
        return warning("space", text, advice)
    return ok("space", text)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # Older than any: it is not the one that is looked for.


def _date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _line(thing: object) -> str:
    return " ".join(str(thing).split())[:300]
