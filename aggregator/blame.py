"""Which sites a secure run goes on without, because of shares that were wrong.

What a round shows is of two kinds (``privacy.secagg.server``):

- A **fault** is a site's own, and signed by it. It is left out.
- A **dispute** is between two sites: one says that the other dealt it a share that is
  not the one it committed to. One of them lies and nobody can tell which, since the
  share came sealed. At most one of the two is left out.

An honest site has disputes with faulty ones only. So a site that has more of them
than sites may fail at all, N - t, is at fault. Of the disputes that remain the fewest
sites are left out that settle all: first those with most of them, and the one that
dealt where two have as many. Then a liar keeps at most one honest site out: with its
second lie it is the one that most disputes have in common, and who it accused is
asked again.

Who is left out counts among the N - t sites that may be missing. Beyond that nobody
is: a round would have no sum either way.
"""

from collections import Counter
from collections.abc import Mapping

from federation.ids import SiteId
from privacy.secagg.contract import Contract
from privacy.secagg.server import AggregatorRound


class Blame:
    """What rounds have shown of sites, from the start of a coordinator to its end."""

    def __init__(self, contract: Contract) -> None:
        """Begin with nobody under suspicion."""
        self._most = contract.num_sites - contract.quorum
        self._faults: dict[SiteId, str] = {}
        self._disputes: dict[tuple[SiteId, SiteId], None] = {}

    def note(self, current: AggregatorRound) -> list[str]:
        """Take in what a round has shown.

        Returns:
            What is new of it, in words.
        """
        said = []
        for site, fault in current.faults.items():
            if site not in self._faults:
                self._faults[site] = fault
                said.append(f"site {site!r} is at fault: {fault}")
        for accuser, dealer in current.disputes:
            if (accuser, dealer) not in self._disputes:
                self._disputes[accuser, dealer] = None
                said.append(
                    f"site {accuser!r} says that site {dealer!r} dealt it another "
                    "share than it committed to: one of the two is at fault"
                )
        return said

    def left_out(self) -> Mapping[SiteId, str]:
        """Sites that are not asked any more, and why."""
        found = dict(self._faults)
        for site, others in self._opponents().items():
            if len(others) > self._most:
                found.setdefault(site, f"in dispute with {_listed(others)}")
        while open_ := [pair for pair in self._disputes if not found.keys() & {*pair}]:
            count = Counter(site for pair in open_ for site in pair)
            dealers = {dealer for _, dealer in open_}
            worst = max(sorted(count), key=lambda s: (count[s], s in dealers))
            found[worst] = f"in dispute with {_listed(self._opponents()[worst])}"
        return dict(list(found.items())[: self._most])

    def _opponents(self) -> dict[SiteId, set[SiteId]]:
        found: dict[SiteId, set[SiteId]] = {}
        for accuser, dealer in self._disputes:
            found.setdefault(accuser, set()).add(dealer)
            found.setdefault(dealer, set()).add(accuser)
        return found


def _listed(sites: set[SiteId]) -> str:
    return ", ".join(map(repr, sorted(sites)))
