"""Which sums a site joins, over all runs on the same data.

Secure aggregation hides an update in one sum. Two sums differ by the sites that are in
one alone: five sites and then four of them, with the same seed, give away the fifth
site's update. More sums allow more: with {1,2,3}, {3,4,5} and {1,2,4,5}, any two of
which differ by two sites or more, the first plus the second minus the third is twice
the update of site 3.

Sums with differential privacy ("private" here; the others are "open") take part: five
sites in an open sum and four of them in a private one give away the fifth site's
update, hidden by nothing but the noise of the others.

Sites that were in exactly the same sums are an *atom*. A linear combination of sums
weighs all sites of an atom alike, so what it leaves over is a union of atoms. If each
atom has at least k sites, then so has whatever any combination singles out. Atoms of
sites that were in private sums alone may be smaller: whatever is left over of them
holds the noise of these sums, and their ledgers have charged it. The
converse does not hold: {1,2,3,4} and {3,4,5,6} have atoms of two, and no combination
that singles out fewer than four. The rule is stricter than it must be, and can be
explained to the people whose sites it concerns.

A site sees only the sums that it is asked to join. What others open without it, or
tell the aggregator of their own updates, it cannot know: the explanation of secure
aggregation says what that leaves open.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from clients.privacy.site_memory import Document, SiteMemory
from federation.ids import SiteId
from privacy.secagg.agreement.contract import Contract, Setting
from privacy.secagg.errors import CohortRefused, ContractRefused

Cohort = frozenset[SiteId]

DOCUMENT = "cohorts"


def atoms(cohorts: Iterable[Cohort]) -> list[Cohort]:
    """Group the sites that are in exactly the same cohorts.

    Returns:
        A partition of all sites of the cohorts, in the order of the names.
    """
    known = list(cohorts)
    groups: dict[tuple[bool, ...], set[SiteId]] = {}
    for site in sorted(frozenset().union(*known)):
        groups.setdefault(tuple(site in cohort for cohort in known), set()).add(site)
    return [frozenset(group) for group in groups.values()]


def singled_out(
    cohorts: Collection[Cohort], private: Collection[Cohort] = (), *, smallest: int
) -> list[Cohort]:
    """Find the groups that sums over several cohorts may single out.

    Args:
        cohorts: Sets of sites whose updates were, or may be, summed without noise.
        private: Those of sums with differential privacy.
        smallest: k, fewest sites of a group.

    Returns:
        Atoms of fewer than k sites of which some sum has no noise. None if there is
        one cohort alone: how large that must be is the contract's, not a matter of
        differences.
    """
    known, bare = {*cohorts, *private}, frozenset[SiteId]().union(*cohorts)
    if len(known) < 2:  # noqa: PLR2004
        return []
    return [atom for atom in atoms(known) if len(atom) < smallest and atom <= bare]


@dataclass(frozen=True, slots=True, kw_only=True)
class CohortRule:
    """Which sums a site joins on one dataset.

    Attributes:
        memory: Holds the cohorts of earlier runs, beyond them.
        lineage: Which runs count: what the operator calls the data. Seed, job, model
            and run do not, since the aggregator chooses them: a model with a unit
            more, whose weights it sets to nothing, has the same updates.
        smallest: k, fewest sites that sums together may single out.
        accept_dropouts: Whether the operator accepts that a sum without some sites of
            the contract is opened, and so what those sites have added to others.
        is_private: Whether this run's sums have differential privacy. Two of them may
            differ by any sites; one that splits a group of an open sum is refused.
        parts: Sites whose updates are in a part of each sum where those of others are
            zero, see ``federation.job.adapter_ranks.contributors``. Each counts as a
            sum: a run in which all sites are in that part would single out the others.
    """

    memory: SiteMemory
    lineage: str
    smallest: int
    accept_dropouts: bool
    is_private: bool
    parts: tuple[Cohort, ...] = ()

    def check(self, cohort: Cohort) -> None:
        """Check whether this site may join a sum over a cohort.

        Raises:
            CohortRefused: With the sums of before, it would single out too few sites.
            StoreError: The memory cannot be read.
        """
        self._check(self.memory.read(DOCUMENT).get(self.lineage, {}), cohort)

    def check_contract(self, contract: Contract) -> None:
        """Check a contract: its sites as a cohort, and the sites that may be absent.

        Raises:
            ContractRefused: ``members`` or ``threshold`` breaks the rule.
            StoreError: The memory cannot be read.
        """
        try:
            self.check(_names(contract, contract.cohort))
        except CohortRefused as error:
            raise ContractRefused(str(error), key="members") from error
        if contract.setting is Setting.P2:
            fault = self.threshold_fault(contract.num_sites, contract.threshold)
            if fault:
                raise ContractRefused(fault, key="threshold")

    def threshold_fault(self, num_sites: int, threshold: int) -> str:
        """Say why a threshold needs consent; empty if it does not."""
        absent = num_sites - threshold
        is_allowed = self.accept_dropouts or self.is_private
        if is_allowed or not 0 < absent < self.smallest:
            return ""
        return (
            f"it lets rounds continue without up to {absent} of {num_sites} sites, but "
            "this site's operator does not accept that (policy.accept_dropouts): "
            "comparing it with the previous round would reveal their updates. Set the "
            "threshold to the number of sites"
        )

    def join(self, contract: Contract) -> None:
        """Record a contract's sites as a cohort, durably, before anything leaves.

        Raises:
            CohortRefused: See ``check``; nothing is recorded.
            StoreError: It cannot be made durable.
        """
        self._record(_names(contract, contract.cohort), is_dropout=False)

    def leave_out(self, contract: Contract, survivors: Collection[int]) -> None:
        """Record the survivors of a round, durably, before this site consents.

        Args:
            contract: The run's.
            survivors: Numbers of the sites whose sum is about to be opened.

        Raises:
            CohortRefused: Sites are missing, with them too few would be singled out,
                and the operator has not accepted that; nothing is recorded.
            StoreError: It cannot be made durable.
        """
        if set(survivors) != set(contract.cohort):
            self._record(_names(contract, survivors), is_dropout=True)

    def _record(self, cohort: Cohort, *, is_dropout: bool) -> None:
        cohorts = self._with_parts(cohort)

        def add(document: Document) -> Document:
            mine = document.get(self.lineage, {})
            try:
                self._check(mine, cohort)
            except CohortRefused:
                if not (is_dropout and self.accept_dropouts):
                    raise
                kind = "accepted"  # It is the operator's choice, and no rule.
            else:
                kind = "private" if self.is_private else "cohorts"
            known = _known(mine, "cohorts") | _known(mine, "private")
            if kind == "private" and atoms(known) == atoms(known | cohorts):
                return document  # However many rounds lose sites, few split a group.
            after = sorted(map(sorted, _known(mine, kind) | cohorts))
            return {**document, self.lineage: {**mine, kind: after}}

        self.memory.update(DOCUMENT, add)

    def _with_parts(self, cohort: Cohort) -> set[Cohort]:
        """Cohorts of all parts of a sum."""
        return {cohort, *(found for part in self.parts if (found := part & cohort))}

    def _check(self, mine: Document, cohort: Cohort) -> None:
        cohorts = self._with_parts(cohort)
        bare, private = _known(mine, "cohorts"), _known(mine, "private")
        if self.is_private:
            before = atoms(bare | private)
            found = singled_out(bare, private | cohorts, smallest=self.smallest)
            found = [group for group in found if group not in before]
        else:
            found = singled_out(bare | cohorts, private, smallest=self.smallest)
        if not found:
            return
        few = " and ".join(", ".join(sorted(group)) for group in found)
        parts = ", of which some train fewer ranks (lora_rank)" if self.parts else ""
        way_out = "or make training private (privacy.differential_privacy); "
        if self.is_private:
            way_out = ""
        raise CohortRefused(
            f"a sum over {', '.join(sorted(cohort))}{parts}, together with earlier "
            f"sums on the same data that this site joined, would single out {few}, "
            "but this "
            f"site's operator requires groups of {self.smallest} or more. Run with the "
            "same sites as before, or add or remove at least that many at a time; "
            f"{way_out}or ask this site's operator to accept it (policy.min_group)"
        )


def _known(mine: Document, kind: str) -> set[Cohort]:
    """Cohorts of one kind; a document has only kinds that have been noted."""
    return {frozenset(map(SiteId, cohort)) for cohort in mine.get(kind, ())}


def _names(contract: Contract, numbers: Iterable[int]) -> Cohort:
    return frozenset(contract.member(number).site for number in numbers)
