"""What alerts need to know of the aggregator's host, read from its files."""

import json
from collections import Counter
from pathlib import Path

from cloud_adapters.superlink.answer_limits import free_bytes
from deploy.aggregator_host import enrolment_operator
from deploy.aggregator_host.config import AggregatorConfig
from federation.errors import FederationError
from federation.protocols import Clock
from monitoring.web.alerts import HostFacts

LOOK_SECONDS = 60.0  # At certificates, which end after months.


class Host:
    """Reads the host's facts again and again."""

    def __init__(
        self, config: AggregatorConfig, clock: Clock, *, log: Path | None = None
    ) -> None:
        """Begin at the end of the proxy's log: what is there was told before.

        Args:
            config: The aggregator's.
            clock: Tells time.
            log: The log of nginx, if it is elsewhere.
        """
        self._config, self._clock = config, clock
        self._expires: dict[str, float] = {}
        self._next_look = 0.0
        self._log = log or config.proxy / "access.log"
        self._offset = self._log_size()

    def facts(self) -> HostFacts:
        """The facts now; knocks are those since the last call."""
        now = self._clock.monotonic()
        if now >= self._next_look:
            self._next_look, self._expires = now + LOOK_SECONDS, self._certificates()
        return HostFacts(
            free_bytes=free_bytes(self._config.folder),
            reserve_bytes=self._config.file.limits.bytes().reserve,
            expires=self._expires,
            knocks=self._knocks(),
        )

    def _certificates(self) -> dict[str, float]:
        try:
            found = enrolment_operator.overview(self._config, clock=self._clock)
        except FederationError:  # Verbs and the service say what is damaged.
            return self._expires
        rows = (row for row in found.sites if row.state == "enrolled")
        return {f"site {row.site}": row.at for row in rows}

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _knocks(self) -> dict[str, int]:
        """Uses of revoked certificates in what nginx has logged since, by address."""
        size = self._log_size()
        if size < self._offset:
            self._offset = 0  # It was cut, so that it does not fill the disk.
        if size == self._offset:
            return {}
        with self._log.open("rb") as log:
            log.seek(self._offset)
            whole = log.read(size - self._offset).rpartition(b"\n")[0]
        self._offset += len(whole) + 1 if whole else 0
        found: Counter[str] = Counter()
        for line in whole.split(b"\n"):
            if b"certificate revoked" in line:
                told = json.loads(line)
                found[f"{told['from']} ({told['site']})"] += 1
        return dict(found)
