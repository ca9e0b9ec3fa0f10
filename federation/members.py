"""Which sites take part in a run: one value for all sites, and its transitions.

    joined   -> leaving    it says that it leaves, and may end the round that it is in
    joined   -> gone       it says that it leaves, in place of an answer
    leaving  -> gone       the round has ended
    gone     -> joined     it is back under the same identity, or no other is left
    any      <-> left out  it does not keep to the protocol: ``aggregator.blame``

A site's notice that it leaves is not checked. It costs the site what silence would: a
place in rounds. So it decides nothing but whom the aggregator asks.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from federation.ids import SiteId


class Standing(StrEnum):
    """A site's standing in a run."""

    JOINED = "joined"  # it is asked in every round that draws it
    LEAVING = "leaving"  # it is asked in no other round than that which it is in
    GONE = "gone"  # it is asked nothing until it is back
    LEFT_OUT = "left out"  # it is asked nothing, whether or not it is there


@dataclass(frozen=True, slots=True)
class RunMember:
    """A site of a run.

    Attributes:
        standing: What it is to the run.
        reason: Why it is not joined, in one line.
        replaced: How often it came back under the same identity.
    """

    standing: Standing = Standing.JOINED
    reason: str = ""
    replaced: int = 0


JOINED = RunMember()


@dataclass(frozen=True, slots=True)
class Members:
    """The sites of a run; every transition makes another value.

    Attributes:
        noted: What is known of sites; those without an entry have joined.
    """

    noted: Mapping[SiteId, RunMember] = field(default_factory=dict)

    def of(self, site: SiteId) -> RunMember:
        """What is known about a site."""
        return self.noted.get(site, JOINED)

    def standing(self, *standings: Standing) -> Mapping[SiteId, str]:
        """Sites of these standings, each with the reason."""
        found = self.noted.items()
        return {site: one.reason for site, one in found if one.standing in standings}

    def away(self) -> Mapping[SiteId, str]:
        """Sites that get no tasks, and why."""
        return self.standing(Standing.GONE, Standing.LEFT_OUT)

    def present(self, sites: Iterable[SiteId]) -> tuple[SiteId, ...]:
        """The sites of some that have not left."""
        left = self.standing(Standing.LEAVING, Standing.GONE)
        return tuple(site for site in sites if site not in left)

    def leave(self, site: SiteId, reason: str, *, finishes: bool = False) -> "Members":
        """Note that a site leaves; repeating it changes nothing.

        Args:
            site: Leaves now, or after its round if it finishes that.
            reason: Why, in one line.
            finishes: Whether it does what is left of the round that it is in.
        """
        before = self.of(site).standing
        if before is Standing.JOINED and finishes:
            return self._with({site: reason}, Standing.LEAVING)
        if before is Standing.JOINED or (before is Standing.LEAVING and not finishes):
            return self._with({site: reason}, Standing.GONE)
        return self

    def end_round(self) -> "Members":
        """Mark leaving sites as gone."""
        return self._with(self.standing(Standing.LEAVING), Standing.GONE)

    def replaced(self, sites: Collection[SiteId]) -> "Members":
        """Ask sites again that are back: other processes, perhaps on other machines.

        Raises:
            ValueError: One of them was not gone.
        """
        back = {site: self.of(site).replaced + 1 for site in self._gone(sites)}
        entries = {site: RunMember(replaced=times) for site, times in back.items()}
        return Members({**self.noted, **entries})

    def recalled(self, sites: Collection[SiteId]) -> "Members":
        """Ask sites that are gone as if they were silent.

        Raises:
            ValueError: One of them was not gone.
        """
        return self._with(dict.fromkeys(self._gone(sites), ""), Standing.JOINED)

    def asked_in_vain(self, before: "Members") -> Mapping[SiteId, str]:
        """Sites that were gone and are asked although none is back, with the reason."""
        gone = before.standing(Standing.GONE)
        return {
            site: reason
            for site, reason in gone.items()
            if self.of(site).standing is Standing.JOINED
            and self.of(site).replaced == before.of(site).replaced
        }

    def leave_out(self, sites: Mapping[SiteId, str]) -> "Members":
        """Leave out these sites, each for a reason, and no others."""
        before = self.standing(Standing.LEFT_OUT)
        back = self._with(
            {site: "" for site in before if site not in sites}, Standing.JOINED
        )
        return back._with(sites, Standing.LEFT_OUT)  # noqa: SLF001 -- of this class

    def for_round(
        self, drawn: Sequence[SiteId], *, back: Collection[SiteId], quorum: int
    ) -> "Members":
        """See who may be asked in a round.

        If too few are left for the quorum, those who are gone are asked, too, as if
        they were silent. A coordinator waits for them before that.

        Args:
            drawn: The sites of the round.
            back: Who is back of those who were gone.
            quorum: Answers without which the round is lost.

        Raises:
            ValueError: One of ``back`` was not gone.
        """
        members = self.replaced(back)
        asked = [site for site in drawn if members.of(site).standing is Standing.JOINED]
        if len(asked) >= quorum:
            return members
        gone = members.standing(Standing.GONE)
        return members.recalled([site for site in drawn if site in gone])

    def _gone(self, sites: Collection[SiteId]) -> Collection[SiteId]:
        odd = [s for s in sites if self.of(s).standing is not Standing.GONE]
        if odd:
            raise ValueError(f"sites that are not gone cannot come back: {odd}")
        return sites

    def _with(self, sites: Mapping[SiteId, str], standing: Standing) -> "Members":
        entries = {
            site: replace(self.of(site), standing=standing, reason=reason)
            for site, reason in sites.items()
        }
        return Members({**self.noted, **entries})


EVERYBODY = Members()
