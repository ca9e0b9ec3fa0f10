"""Which setup of a secure run is in force, and when it needs a new one.

Keys of a run are only in the sites' memory, so a site that restarts has none. It
says so when it is asked for a round (``FailureKind.NOT_SET_UP``), or its connection
was seen to end (``FailureKind.DISCONNECTED``). The next round begins with a new setup
of all sites but those that are left out for a fault (``blame``): other run keys,
another h_U, round numbers that continue. One attempt a round at most; and if someone is
missing from it while enough others have keys, they continue under the setup that they
have. If there is no such setup, who was silent twice is left out of the next one: not
who refuses it, since that takes a person.
"""

from collections import Counter
from collections.abc import Collection

from federation.ids import SiteId
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.protocol.setup import SetupRecord

_MOST_SILENCES = 2  # A site may be slow once.


class RunSetup:
    """The setup in force, as far as the aggregator knows."""

    def __init__(self, contract: Contract) -> None:
        """Begin without one."""
        self._quorum = contract.quorum
        self._sites = frozenset(member.site for member in contract.members)
        self._silent: Counter[SiteId] = Counter()
        self._record: SetupRecord | None = None
        self._lacking: set[SiteId] = set()
        self._asked = False
        self._confirmed: set[SiteId] = set()
        self._disconnected: set[SiteId] = set()

    @property
    def in_force(self) -> SetupRecord | None:
        """The setup under which a round can have a sum; None if there is none."""
        if self._record is None:
            return None
        numbers, contract = self._record.cohort, self._record.contract
        with_keys = {contract.member(i).site for i in numbers} - self._lacking
        return self._record if len(with_keys) >= self._quorum else None

    @property
    def is_due(self) -> bool:
        """Whether to attempt a new setup before the next round."""
        return self._asked or self.in_force is None

    def attempt(self) -> None:
        """Note that a new setup is attempted.

        A site that is silent now is asked again once it has spoken: each attempt
        waits for it as long as a round's deadline.
        """
        self._asked = False

    def take(self, record: SetupRecord) -> None:
        """Put a finished setup in force."""
        self._record = record
        self._lacking.clear()
        self._confirmed.clear()
        for number in record.cohort:
            del self._silent[record.contract.member(number).site]

    def note_silent(self, sites: Collection[SiteId]) -> None:
        """Note that these sites were silent in a setup that failed."""
        self._silent.update(sites)

    def without(self, left_out: Collection[SiteId]) -> Collection[SiteId]:
        """Add to the sites that a setup leaves out those that were silent too often.

        Not if too few others are left, which need them. A site is asked again once it
        has answered a task.
        """
        silent = {
            site for site, times in self._silent.items() if times >= _MOST_SILENCES
        }
        without = silent.union(left_out)
        return without if len(self._sites - without) >= self._quorum else left_out

    def note_lacking(self, site: SiteId) -> None:
        """Note that a site has no keys of the setup in force."""
        del self._silent[site]
        self._lacking.add(site)
        self._asked = True

    def note_disconnected(self, site: SiteId) -> None:
        """Note that a site's connection ended: if it was restarted it has no keys.

        Then a round under this setup would be lost as soon as the site is back. One
        new setup is attempted for that, until the site has answered again.
        """
        if site not in self._disconnected:
            self._disconnected.add(site)
            self._asked = True

    def note_answer(self, site: SiteId) -> None:
        """Note that a site has answered a round of the setup in force."""
        del self._silent[site]
        self._confirmed.add(site)
        self._disconnected.discard(site)

    def confirms_for(self, site: SiteId) -> bytes:
        """What a site's next task has to carry: all confirms, until it answers."""
        if self._record is None or site in self._confirmed:
            return b""
        return self._record.confirms
