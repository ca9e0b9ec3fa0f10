"""Tell a person what ``monitoring.web.alerts`` finds: each alert once, to each place.

What was told is in ``alerts.json``, so that a restart does not tell it again. A place
that cannot be reached is tried again for half an hour. An outage of a thousand sites is
one message.
"""

import contextlib
import email.utils
import json
import smtplib
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from email.message import EmailMessage
from pathlib import Path
from urllib.parse import urlsplit

from cloud_adapters.net.short_requests import ask
from deploy.aggregator_host.config import AlertSpec, check_alert
from federation.addresses import parse_address
from federation.durable_files import replace_file
from federation.errors import FederationError, StoreUnavailable
from federation.protocols import Clock
from monitoring.terminal.progress import printable
from monitoring.web.alerts import Alert

SEND_SECONDS = 10.0
RETRY_SECONDS, MAX_ATTEMPTS = 30.0, 7  # After 30 s, a minute, two and so on.
# An alert whose cause has gone is told anew only after this long.
QUIET_SECONDS = 3600.0
MAX_CHARS = 1000
MAX_MEMBERS = 5  # Of a crowd, by name.
_MAX_ANSWER = 1 << 16
_OK = 300

Send = Callable[[str], None]


@dataclass(kw_only=True)
class _Told:
    """One alert at one place.

    Attributes:
        seen_at: When its cause was last there, seconds since 1970.
        place: Its name.
        text: What is told.
        crowd: Those of one crowd that are due together are told in one message.
        member: Who in the crowd it is about.
        attempts: How often delivery has failed.
        is_done: Whether it was delivered, or given up.
        next_at: When to try again.
    """

    seen_at: float
    place: str = ""
    text: str = ""
    crowd: str = ""
    member: str = ""
    attempts: int = 0
    is_done: bool = False
    next_at: float = 0.0


@dataclass(kw_only=True)
class AlertDelivery:
    """Delivers alerts to all places of an operator.

    Attributes:
        places: How to send a text to each place, by a name without secrets.
        path: ``alerts.json``.
        clock: Tells time.
        listener: Called with a word about a place that cannot be reached.
    """

    places: Mapping[str, Send]
    path: Path
    clock: Clock
    listener: Callable[[str], None]
    _told: dict[str, _Told] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what was told before."""
        # A damaged file costs a second message, and no alert.
        with contextlib.suppress(OSError, ValueError, TypeError):
            found = dict(json.loads(self.path.read_bytes()))
            self._told = {key: _Told(**told) for key, told in found.items()}

    def deliver(self, alerts: Sequence[Alert]) -> None:
        """Tell what has not been told; forget what has been over for a while."""
        now, changed = self.clock.now(), False
        for alert in alerts:
            for place in self.places:
                told = self._told.setdefault(f"{place} {alert.key}", _Told(seen_at=now))
                told.seen_at, told.place, told.text = now, place, alert.text
                told.crowd, told.member = alert.crowd, alert.member
        down = set[str]()  # So that no place keeps an alert from the others for long.
        for together in self._due(now):
            place, send = together[0].place, self.places.get(together[0].place)
            if send and place not in down:
                down |= set() if self._try(together, send) else {place}
                changed = True
        over = [k for k, t in self._told.items() if now > t.seen_at + QUIET_SECONDS]
        for key in over:
            del self._told[key]
        if changed or over:
            self._save()

    def _due(self, now: float) -> Sequence[Sequence[_Told]]:
        """What is to be told now, also if its cause has gone since: by message."""
        found: dict[tuple[str, str], list[_Told]] = {}
        for key, told in self._told.items():
            # No try is later than the longest wait, unless the clock was set back.
            waits = now < told.next_at <= now + RETRY_SECONDS * 2**MAX_ATTEMPTS
            if not (told.is_done or waits):
                found.setdefault((told.place, told.crowd or key), []).append(told)
        return [*found.values()]

    def _try(self, together: Sequence[_Told], send: Send) -> bool:
        try:
            send(f"crossfed: {printable(_in_one(together), MAX_CHARS)}")
        # ValueError: a library finds text that it cannot send. Others must be told.
        except (
            FederationError,
            OSError,
            subprocess.SubprocessError,
            ValueError,
        ) as error:
            for told in together:
                told.attempts += 1
                wait = RETRY_SECONDS * 2 ** (told.attempts - 1)
                told.next_at = self.clock.now() + wait
                told.is_done = told.attempts >= MAX_ATTEMPTS
            first = together[0]
            if first.attempts == 1 or first.is_done:
                then = "it is given up" if first.is_done else "it is tried again"
                self.listener(f"an alert did not reach {first.place}: {error}; {then}")
            return False
        for told in together:
            told.is_done = True
        return True

    def _save(self) -> None:
        record = {key: asdict(told) for key, told in self._told.items()}
        try:
            replace_file(self.path, [json.dumps(record).encode()])
        except StoreUnavailable as error:
            self.listener(f"cannot note which alerts were told: {error}")


def _in_one(together: Sequence[_Told]) -> str:
    """One text for a crowd: how many they are, and the first of them in full."""
    first, *others = together
    if not others:
        return first.text
    named = ", ".join(told.member for told in together[:MAX_MEMBERS])
    more = len(together) - MAX_MEMBERS
    rest = f" and {more:,} more" if more > 0 else ""
    return f"{len(together):,} alerts like this: {named}{rest}. The first: {first.text}"


def places(specs: Sequence[AlertSpec]) -> Mapping[str, Send]:
    """How to send a text to each place of a configuration.

    Raises:
        JobError: An entry of ``alerts`` names no place, several, or one that cannot be.
    """
    found: dict[str, Send] = {}
    for index, spec in enumerate(specs):
        check_alert(spec, key=f"alerts[{index}]")
        for name, send in _ways(spec):
            own = name  # Of two places with one name, each is told.
            while own in found:
                own += " (another)"
            found[own] = send
    return found


def _ways(spec: AlertSpec) -> Iterator[tuple[str, Send]]:
    if spec.webhook:
        # The rest of such an address is often a secret.
        host = urlsplit(spec.webhook).hostname

        def post(text: str) -> None:
            answer = ask(
                spec.webhook,
                max_bytes=_MAX_ANSWER,
                method="POST",
                body=json.dumps({"text": text}).encode(),
                headers={"content-type": "application/json"},
            )
            if answer.status >= _OK:
                raise FederationError(f"it answers with status {answer.status}")

        yield f"the webhook at {host}", post
    if spec.command:

        def run(text: str) -> None:
            subprocess.run(  # noqa: S603 -- the operator's own command, no shell
                spec.command,
                input=f"{text}\n".encode(),
                check=True,
                timeout=SEND_SECONDS,
                stdout=subprocess.DEVNULL,
            )

        yield f"the command {spec.command[0]}", run
    if spec.email:

        def mail(text: str) -> None:
            message = EmailMessage()
            message["subject"] = text.partition(". ")[0][:200]
            sender = spec.sender or spec.email
            message["from"], message["to"] = sender, spec.email
            message["date"] = email.utils.localtime()
            # Of the sender's domain: looking up this host's own may take long.
            domain = sender.rpartition("@")[2]
            message["message-id"] = email.utils.make_msgid(domain=domain)
            message.set_content(text)
            host, port = parse_address(spec.smtp, key="smtp")
            with smtplib.SMTP(host, port, timeout=SEND_SECONDS) as server:
                server.send_message(message)

        yield spec.email, mail
