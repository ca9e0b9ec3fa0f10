"""A site's part in drawing groups, and its memory of the draw.

Robust rules over sums of groups rest on groups that nobody chose
(``privacy.secagg.agreement.groups``). An aggregator that could have them drawn again
would choose all the same, by throwing away what it does not like. So a site takes part
in one draw for each dataset, for any job, seed or model, all of which the
aggregator chooses. What a site committed itself with, and the commitments of the others
for which it revealed its secret, are durable before they leave. Only a draw that did
not come to its end is followed by another, without the sites that kept it from ending;
each site counts these draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clients.privacy.site_memory import Document, SiteMemory
from federation.ids import SiteId
from federation.job.spec import JobSpec
from privacy.keystream import RandomBytes
from privacy.secagg.agreement.groups import (
    MAX_DRAWS,
    SECRET_BYTES,
    Draw,
    commit,
    draw_of,
    named_groups,
    outcome_of,
    read_commitments,
    read_group_offer,
    read_start,
    write_finished,
    write_reveal,
)
from privacy.secagg.agreement.identity import Identity
from privacy.secagg.agreement.policy import Group
from privacy.secagg.agreement.roster import Roster
from privacy.secagg.errors import DrawRefused, OutOfOrder

DOCUMENT = "groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """One site's part in drawing the groups of a job.

    Attributes:
        site: This site.
        memory: Holds the draw, beyond the run.
        dataset: What the operator calls the data: runs on the same have the same
            groups.
        draw: What is drawn, from the job that this site works on.
        random_bytes: Source of its secret.
    """

    site: SiteId
    memory: SiteMemory
    dataset: str
    draw: Draw
    random_bytes: RandomBytes

    def commit(self, start: bytes, identity: Identity) -> bytes:
        """Commit to a secret that is drawn once; an encoded ``groups.Commitment``.

        A site that has seen all secrets answers with the whole draw instead.

        Raises:
            DrawRefused: The groups of this dataset are others, and may not be drawn
                again so.
            MalformedMessage: ``start`` is no start of a draw.
            StoreError: The secret cannot be read or made durable.
        """
        draw = read_start(self.draw, start)
        if self.site not in draw.sites:
            raise DrawRefused("this site was left out, but was asked for a commitment")

        def enter(document: Document) -> Document:
            draws = _entered(document.get(self.dataset, []), draw, self.random_bytes)
            return {**document, self.dataset: draws}

        mine = self.memory.update(DOCUMENT, enter)[self.dataset][-1]
        number = _number(draw, self.site)
        if "secrets" in mine:
            return write_finished(
                number, _bytes(mine, "commitments"), _bytes(mine, "secrets")
            )
        return commit(draw, number, bytes.fromhex(mine["secret"]), identity)

    def reveal(self, data: bytes) -> bytes:
        """Reveal this site's secret after all commitments were shown.

        Guarantee:
            The commitments are durable, and no others are accepted afterwards.

        Raises:
            DrawRefused: This site's own commitment is not among them, or they are not
                those for which it has revealed its secret before.
            ProtocolError: They are not the signed commitments of all sites.
            StoreError: They cannot be made durable.
        """
        draw, mine = self._newest(self.memory.read(DOCUMENT))
        shown, number = read_commitments(draw, data), _number(draw, self.site)
        secret = bytes.fromhex(mine["secret"])
        if shown[number] != draw.commitment(number, secret):
            raise DrawRefused("a different commitment is shown for this site")
        self._note(draw, "commitments", shown)
        return write_reveal(number, secret)

    def take_offer(self, data: bytes) -> tuple[Group, bytes]:
        """Find this site's group, and the offer of its contract.

        Guarantee:
            The secrets are durable, and no groups are drawn again.

        Raises:
            DrawRefused: Secrets do not belong to the commitments that are noted.
            OutOfOrder: This site has revealed nothing yet.
            MalformedMessage: The bytes are not the offer of a group's contract.
            StoreError: The memory cannot be read, or they cannot be made durable.
        """
        secrets, offer = read_group_offer(data)
        draw, mine = self._newest(self.memory.read(DOCUMENT))
        if "commitments" not in mine:
            raise OutOfOrder("received a contract before groups were drawn")
        outcome = outcome_of(draw, _bytes(mine, "commitments"), secrets)
        self._note(draw, "secrets", secrets)
        group = frozenset(outcome.group_of(self.site))
        return Group(sites=group, partition=outcome.digest), offer

    def _newest(self, document: Document) -> tuple[Draw, Document]:
        """The current or finished draw, and its record."""
        draws = document.get(self.dataset, [])
        if not draws:
            raise OutOfOrder("takes part in no draw: it was not asked for a commitment")
        mine = draws[-1]
        left_out = set(self.draw.sites) - set(mine["sites"])
        try:
            draw = self.draw.without(left_out)
        except ValueError:
            raise _other_groups(mine) from None
        if draw.context.hex() != mine["context"]:
            raise _other_groups(mine)
        return draw, mine

    def _note(self, draw: Draw, what: str, shown: Mapping[int, bytes]) -> None:
        """Store what all sites have shown, once.

        Raises:
            DrawRefused: Something else was noted before, or another draw has begun.
        """

        def add(document: Document) -> Document:
            newest, mine = self._newest(document)
            if newest != draw:
                raise DrawRefused("another draw has started in the meantime")
            if what in mine:
                _check_same(draw, shown, _bytes(mine, what))
                return document
            listed = {str(number): value.hex() for number, value in shown.items()}
            draws = [*document[self.dataset][:-1], {**mine, what: listed}]
            return {**document, self.dataset: draws}

        self.memory.update(DOCUMENT, add)


def _entered(
    draws: list[Document], draw: Draw, random_bytes: RandomBytes
) -> list[Document]:
    """The draws of a dataset, with the next one added unless it has started.

    A draw in which this site has revealed nothing is forgotten. After one in which it
    has, and whose secrets it never saw, another may begin: without at least one of its
    sites, none of which comes back, and ``MAX_DRAWS`` times in all.

    Raises:
        DrawRefused: It may not begin.
    """
    context = draw.context.hex()
    if draws and draws[-1]["context"] == context:
        return draws
    revealed = [each for each in draws if "commitments" in each]
    if revealed:
        last = revealed[-1]
        if last["context"] == context:
            return revealed
        before = {site for each in revealed for site in each["sites"]}
        failed, back = set(last["sites"]), before - set(last["sites"])
        if (
            "secrets" in last
            or failed <= set(draw.sites)
            or back & set(draw.sites)
            or len(revealed) >= MAX_DRAWS
        ):
            raise _other_groups(last, sorted(back & set(draw.sites)))
    entry = {
        "context": context,
        "sites": list(draw.sites),
        "num_groups": draw.num_groups,
        "secret": random_bytes(SECRET_BYTES).hex(),
    }
    return [*revealed, entry]


def _number(draw: Draw, site: SiteId) -> int:
    return draw.sites.index(site) + 1


def _bytes(mine: Document, what: str) -> dict[int, bytes]:
    return {int(number): bytes.fromhex(value) for number, value in mine[what].items()}


def _other_groups(mine: Document, back: Sequence[str] = ()) -> DrawRefused:
    """Refuse to draw different groups than before."""
    failed = (
        f"{', '.join(back)} did not reveal a secret in an earlier draw. "
        if back
        else ""
    )
    return DrawRefused(
        f"has drawn {mine['num_groups']} groups of {', '.join(mine['sites'])} for runs "
        "on this data, and takes part in no other draw, because a repeated "
        f"draw lets someone choose the groups. {failed}Run with the same sites and "
        "number of groups. Until a draw is complete, a site that blocks it may be "
        f"left out or replaced, up to {MAX_DRAWS - 1} times"
    )


def _check_same(
    draw: Draw, shown: Mapping[int, bytes], known: Mapping[int, bytes]
) -> None:
    changed = [m.site for m in draw.members if shown[m.number] != known[m.number]]
    if changed:
        raise DrawRefused(
            f"{', '.join(changed)} committed to a different secret than when the "
            "groups for this data were drawn: a site has lost its memory, or the "
            "aggregator is trying to change the groups. Run without it, or replace it "
            "with another site"
        )


def group_rule(
    job: JobSpec,
    *,
    site: SiteId,
    roster: Roster,
    memory: SiteMemory,
    dataset: str,
    random_bytes: RandomBytes,
) -> GroupRule | Group | None:
    """Make a site's part in drawing the groups of a job; None if it has none.

    Where the job names the groups, this is the site's own.
    """
    if job.schedule.groups:
        named = named_groups(job.schedule.groups)
        mine = named.group_of(site)
        return Group(
            sites=frozenset(mine),
            partition=named.digest,
            threshold=job.group_threshold(mine),
        )
    num_groups = job.privacy.secure_aggregation.groups
    if num_groups is None:
        return None
    return GroupRule(
        site=site,
        memory=memory,
        dataset=dataset,
        draw=draw_of(
            roster,
            [SiteId(spec.name) for spec in job.sites],
            num_groups=num_groups,
        ),
        random_bytes=random_bytes,
    )
