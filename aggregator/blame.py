"""Which sites a secure run excludes because of wrong shares.

What a round shows is of two kinds (``privacy.secagg.protocol.server``):

- A **fault** is a site's own, and signed by it. It is left out.
- A **dispute** is between two sites: one says that the other dealt it a share that is
  not the one it committed to. One of them lies, and it is unknown which, since the
  share came sealed. At most one of the two is left out.

An honest site has disputes with faulty ones only. So the faulty sites settle all
disputes, and what is left out is the smallest set of sites that does. Then a liar
keeps at most one honest site out: with its second lie it is the one that both
disputes have in common, and who it accused first is asked again. Of two sites with as
many disputes it is the one that was silent more often, or else the one that dealt.

Who is left out counts among the N - t sites that may be missing. If no set of so few
settles all disputes, more sites are faulty than a round can do without, and only
those that are at fault for certain are left out.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from federation.ids import SiteId
from federation.protocols import NO_SUSPICIONS, Suspicions
from privacy.secagg.agreement.contract import Contract
from privacy.secagg.protocol.server import AggregatorRound

Pair = tuple[SiteId, SiteId]  # Who says it, and of whom.


class Blame:
    """Faults and disputes that the rounds of a run have shown.

    Args:
        contract: The run's.
        known: What the checkpoint says of the rounds before.
    """

    def __init__(self, contract: Contract, known: Suspicions = NO_SUSPICIONS) -> None:
        """Go on from what is known."""
        self._most = contract.num_sites - contract.quorum
        self._faults: dict[SiteId, str] = dict(known.faults)
        self._disputes: dict[Pair, None] = dict.fromkeys(known.disputes)
        self._silences: Counter[SiteId] = Counter(known.silences)

    def suspicions(self) -> Suspicions:
        """What the next round needs to know."""
        return Suspicions(
            faults=dict(self._faults),
            disputes=tuple(self._disputes),
            silences=dict(self._silences),
        )

    def note(self, current: AggregatorRound) -> list[str]:
        """Add what a round has shown.

        Returns:
            What is new of it, in words.
        """
        said = []
        self._silences.update(current.silent - self.left_out().keys())
        for site, fault in current.faults.items():
            if site not in self._faults:
                self._faults[site] = fault
                said.append(f"site {site!r} is at fault: {fault}")
        for accuser, dealer in current.disputes:
            if (accuser, dealer) not in self._disputes:
                self._disputes[accuser, dealer] = None
                said.append(
                    f"site {accuser!r} says that site {dealer!r} sent it a share that "
                    "does not match its commitment: one of the two is at fault"
                )
        return said

    def left_out(self) -> Mapping[SiteId, str]:
        """Excluded sites, and why."""
        found = dict(list(self._faults.items())[: self._most])
        open_ = [pair for pair in self._disputes if not found.keys() & {*pair}]
        for site in self._settling(open_, self._most - len(found)) or ():
            others = {x for pair in open_ if site in pair for x in pair} - {site}
            found[site] = f"in dispute with {', '.join(map(repr, sorted(others)))}"
        return found

    def _settling(self, open_: Collection[Pair], most: int) -> list[SiteId] | None:
        """The smallest set of sites that has one of each pair; None if it is larger.

        Either a site is in it or all that it is in dispute with are. The search tries
        both for the site with most disputes, so its depth is ``most`` at most.
        """
        if not open_:
            return []
        degree = _degrees(open_)
        if sum(degree.values()) > 2 * most * max(degree.values()):
            return None  # So few sites are in too few of the disputes.
        dealers = {dealer for _, dealer in open_}
        worst = max(
            sorted(degree),
            key=lambda s: (degree[s], self._silences[s], s in dealers),
        )
        found: list[SiteId] | None = None
        others = sorted({x for pair in open_ if worst in pair for x in pair} - {worst})
        for chosen in ([worst], others)[: degree[worst]]:  # One is as good as one.
            left = [pair for pair in open_ if not {*chosen} & {*pair}]
            room = (most if found is None else len(found) - 1) - len(chosen)
            more = self._settling(left, room) if room >= 0 else None
            if more is not None:
                found = [*chosen, *more]
        return found


def _degrees(pairs: Collection[Pair]) -> Counter[SiteId]:
    """With how many others each site is in dispute."""
    return Counter(site for pair in {frozenset(p) for p in pairs} for site in pair)
