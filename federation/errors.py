"""Every error that crossfed raises on purpose, in one tree.

A message says what happened, where, and what to do about it. ``ValueError`` means that
a caller passed a bad argument; it is not listed here.
"""

import errno
import os
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from federation import OURS

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FOLDERS = re.compile(r"(?<![\w:/.])(?:/[^\s/'\",;:]+)+/")
NO_REMEDY: Mapping[str, Any] = MappingProxyType({})


def clash(name: str) -> str:
    """Explain why a user's module cannot be found; empty if its name is not ours."""
    room = name.partition(".")[0]
    if room not in OURS:
        return ""
    return (
        f"{room!r} is a package of crossfed, which takes precedence over your module "
        "of that name; name yours by file in the job, for example './my_model.py:net', "
        "and import files beside it with a dot, or rename it"
    )


class FederationError(Exception):
    """Base class of the errors that a caller may want to handle.

    Args:
        message: Its text.
        outside: What may leave a deployed site, if that is less.
    """

    _outside = ""

    def __init__(self, message: str = "", *, outside: str = "") -> None:
        """Keep the two texts apart."""
        super().__init__(message)
        self._outside = outside

    @property
    def outside(self) -> str:
        """The text that may leave a deployed site.

        Code of a user may raise errors of ours, too, and quote a record in them. And
        in which folders the site's files are is nobody else's business.
        """
        if self._outside:
            return self._outside
        room = OURS[0]
        for frame, _ in traceback.walk_tb(self.__traceback__):
            room = frame.f_globals.get("__name__", "").partition(".")[0]
        if room not in OURS:
            return type(self).__name__
        number = next((each.errno for each in system_errors(self) if each.errno), 0)
        if number:  # The number alone: a user's OSError may quote a record.
            what = "the disk" if number in _FULL else "a file"
            return f"{what} of the site cannot be used: {os.strerror(number)}"
        return _FOLDERS.sub("", str(self))


def system_errors(error: BaseException | None) -> Iterator[OSError]:
    """Errors of the operating system that caused one, the last one first."""
    while error is not None:
        if isinstance(error, OSError):
            yield error
        error = error.__cause__


def is_full(error: BaseException | None) -> bool:
    """Whether a full disk caused an error: it passes when there is space."""
    return any(each.errno in _FULL for each in system_errors(error))


def is_passing(error: BaseException) -> bool:
    """Whether the same may go well soon: a disk is full, or a store unavailable."""
    cause: BaseException | None = error
    while cause is not None:
        # Its subclasses say what a person must change.
        if type(cause) is StoreUnavailable or getattr(cause, "temporary", False):
            return True
        cause = cause.__cause__
    return is_full(error)


def outside_of(error: BaseException) -> str:
    """The part of an error that may leave a deployed site: of most, only the kind."""
    name = type(error).__name__
    return f"{name}: {error.outside}" if isinstance(error, FederationError) else name


class JobError(FederationError):
    """The job file asks for something unknown, out of range or unsafe.

    Args:
        message: What is wrong and what to write instead.
        key: Dotted key in the job file, for example ``training.batch_size``.
        remedy: Values that would accept the job, by dotted key of ``site.toml``.
    """

    def __init__(
        self,
        message: str,
        *,
        key: str | None = None,
        outside: str = "",
        remedy: Mapping[str, Any] = NO_REMEDY,
    ) -> None:
        """Keep message and key apart, so that callers can add to one of them."""
        where = "" if key is None else f"{key}: "
        super().__init__(where + message, outside=outside and where + outside)
        self.key = key
        self.reason = message
        self.remedy = remedy


def joined(faults: Sequence[JobError]) -> JobError:
    """One error for all faults of a job, so that they are mended at once.

    Args:
        faults: At least one; of several with one key, the first is named, since the
            others often follow from it. Remedies are those of all.
    """
    first = {fault.key: fault for fault in reversed(faults)}
    kept = [fault for fault in faults if first[fault.key] is fault]
    one, *others = kept
    if len(faults) == 1:
        return one
    also = "".join(f";\nalso {fault}" for fault in others)
    outside = "; also ".join(fault.outside for fault in kept)
    where = "" if one.key is None else f"{one.key}: "
    return JobError(
        one.reason + also,
        key=one.key,
        outside=outside.removeprefix(where),
        remedy={key: value for each in faults for key, value in each.remedy.items()},
    )


def broken(rules: Mapping[str, object]) -> list[JobError]:
    """Return an error for each rule that a job breaks.

    Args:
        rules: Whether each is broken, by its key and after a colon why, with what to
            write instead.
    """
    said = (text.partition(": ") for text, is_broken in rules.items() if is_broken)
    return [JobError(reason, key=key) for key, _, reason in said]


class ProtocolError(FederationError):
    """A message breaks the protocol between aggregator and sites."""


class WireError(ProtocolError):
    """Bytes are not a well-formed message of this version."""


class LayoutMismatch(ProtocolError):
    """Two parties hold models of different names, shapes, types or roles."""


class AggregatorAtFault(ProtocolError):
    """The aggregator sent what no honest one does: no site is to blame for it."""


class InvalidUpdate(ProtocolError):
    """A site's answer is malformed, not finite, late, repeated or unasked."""


class SiteError(FederationError):
    """Work failed at a site: its data, its model or its training."""


class SiteNotReady(SiteError):
    """A site cannot take part now, for a reason that may pass: ask it again."""


class ParityFailed(FederationError):
    """An exported model computes something else than the run's model."""


class UserCodeError(SiteError):
    """A user's code failed. Its message may quote a record and stays at the site.

    Args:
        what: The function.
        error: What it raised.
        place: Where, to be put behind the text.
    """

    def __init__(self, what: str, error: Exception, place: str = "") -> None:
        """Keep the text apart from the kind of the error."""
        kind = f"{what} failed with {type(error).__name__}"
        super().__init__(f"{kind}: {error}{place}", outside=kind + place)


class MissingExtra(FederationError):
    """A package is not installed here that an extra of crossfed installs.

    Args:
        package: What cannot be imported or started.
        extra: For example ``aws``.
    """

    def __init__(self, package: str, extra: str) -> None:
        """Name the command that installs it."""
        super().__init__(
            f"{package} is not installed here: pip install 'crossfed[{extra}]'"
        )


class QuorumNotMet(FederationError):
    """Too few sites answered for too many rounds in a row.

    Attributes:
        fault: What happened, without what to do.
    """

    def __init__(self, fault: str, advice: str = "") -> None:
        """Make one; the message says both.

        Args:
            fault: What happened.
            advice: What to do.
        """
        super().__init__(f"{fault}; {advice}" if advice else fault)
        self.fault = fault


class RunConflict(FederationError):
    """Another coordinator has written this run's next checkpoint."""


class HomeConflict(FederationError):
    """Another machine holds this site's home, or what is stored there is older."""


class CheckpointMismatch(FederationError):
    """The checkpoint belongs to a run of another job."""


class RunNotFound(FederationError):
    """There is no run where one was expected."""


class RunStopped(FederationError):
    """Someone stopped the run while it waited for its sites."""


class PrivacyError(FederationError):
    """A privacy guarantee cannot be given, so nothing is released."""


class BudgetExceeded(PrivacyError):
    """A release would exceed a site's epsilon.

    Args:
        message: What was asked, at which site, and what to do.
        epsilon: What the site would have reached; None if only the site knows.
        cap: What it may reach; likewise.
    """

    def __init__(
        self, message: str, *, epsilon: float | None = None, cap: float | None = None
    ) -> None:
        """Keep the numbers apart, so that callers can show them."""
        super().__init__(message)
        self.epsilon = epsilon
        self.cap = cap


class ComputeError(FederationError):
    """A request to a compute service failed."""


class NoCapacity(ComputeError):
    """The cloud has no such machine now, in any of the zones."""


class QuotaReached(ComputeError):
    """The account may not have more machines of this kind."""


class MachineRefused(ComputeError):
    """The cloud knows no such machine type, image, zone or network."""


class ComputeForbidden(ComputeError):
    """These credentials may not do this."""


class ComputeUnauthenticated(ComputeError):
    """There are no credentials, or none that the service accepts."""


class ComputeUnavailable(ComputeError):
    """The service is unreachable or refuses more requests, after all attempts."""


class ComputeUnreachable(ComputeUnavailable):
    """No server answers at the service's address, which may no longer exist."""


class ProofRefused(FederationError):
    """No cloud confirms that a machine is who it claims to be."""


class PlatformUnavailable(FederationError):
    """The cloud that could confirm who a machine is cannot be reached."""


class StoreError(FederationError):
    """A request to an object store failed.

    Args:
        message: What was asked, where, and what to do.
        temporary: Whether the same request may go well if it is made again.
        wait_seconds: How long the service wants callers to wait before that.
    """

    def __init__(
        self, message: str, *, temporary: bool = False, wait_seconds: float = 0.0
    ) -> None:
        """Keep apart what decides on another attempt."""
        super().__init__(message)
        self.temporary = temporary
        self.wait_seconds = wait_seconds


class ObjectNotFound(StoreError):
    """No object has this key."""


class ObjectExists(StoreError):
    """A create-only write found an object in its place."""


class ObjectChanged(StoreError):
    """The object does not have, or no longer has, the expected version."""


class CorruptObject(StoreError):
    """Stored bytes do not match their digest or their format."""


class StoreUnavailable(StoreError):
    """The store cannot be read or written: full, forbidden or unreachable."""


class StoreThrottled(StoreUnavailable):
    """The service kept asking for fewer requests."""


class StoreForbidden(StoreUnavailable):
    """These credentials lack the permission, which someone must grant."""


class NotAuthenticated(StoreUnavailable):
    """There are no credentials, or the service does not accept them."""


class KeyRefused(StoreUnavailable):
    """The key that encrypts objects is wrong, disabled or unavailable."""


class BucketNotFound(StoreUnavailable):
    """The bucket does not exist, or is in another region or project."""


@contextmanager
def os_errors(
    kind: type[FederationError], doing: str, advice: str = ""
) -> Iterator[None]:
    """Raise an error of ours for one of the system, which becomes its cause.

    Args:
        kind: What to raise.
        doing: What cannot be done: ``write PATH``.
        advice: What a person can do; empty if nothing is known.
    """
    try:
        yield
    except OSError as error:
        said = f"cannot {doing}: {error.strerror or error}"
        raise kind(f"{said}; {advice}" if advice else said) from error
