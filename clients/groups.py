"""A site's part in drawing groups, and its memory of the draw.

Robust rules over sums of groups rest on groups that nobody chose
(``privacy.secagg.groups``). An aggregator that could have them drawn again would
choose all the same, by throwing away what it does not like. So a site takes part in
one draw for each dataset, whatever the job, its seed or its model, all of which the
aggregator chooses. What a site committed itself with, and the commitments of the others
for which it revealed its secret, are durable before they leave.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clients.site_memory import Document, SiteMemory
from federation.ids import SiteId
from privacy.secagg.errors import DrawRefused, OutOfOrder
from privacy.secagg.floor import Group
from privacy.secagg.groups import (
    SECRET_BYTES,
    Draw,
    commit,
    outcome_of,
    read_commitments,
    read_group_offer,
    write_reveal,
)
from privacy.secagg.identity import Identity, RandomBytes

DOCUMENT = "groups"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRule:
    """One site's part in drawing the groups of a job.

    Attributes:
        site: This site.
        memory: Holds the draw, beyond the run.
        dataset: What the operator calls the data, or a digest of where it is: runs on
            the same have the same groups.
        draw: What is drawn, from the job that this site works on.
        random_bytes: Source of its secret.
    """

    site: SiteId
    memory: SiteMemory
    dataset: str
    draw: Draw
    random_bytes: RandomBytes

    def commit(self, identity: Identity) -> bytes:
        """Commit to a secret that is drawn once; an encoded ``groups.Commitment``.

        Raises:
            DrawRefused: The groups of this dataset are others.
            StoreError: The secret cannot be read or made durable.
        """

        def draw_secret(document: Document) -> Document:
            mine = document.get(self.dataset, {})
            self._check_context(mine)
            if "secret" in mine:
                return document
            mine = {**mine, "secret": self.random_bytes(SECRET_BYTES).hex()}
            return {**document, self.dataset: mine}

        after = self.memory.update(DOCUMENT, draw_secret)
        secret = bytes.fromhex(after[self.dataset]["secret"])
        return commit(self.draw, self._number, secret, identity)

    def reveal(self, data: bytes) -> bytes:
        """Reveal this site's secret to those whose commitments it was shown.

        Guarantee:
            The commitments are durable, and no others are accepted afterwards.

        Raises:
            DrawRefused: This site's own commitment is not among them, or they are not
                those for which it has revealed its secret before.
            ProtocolError: They are not the signed commitments of all sites.
            StoreError: They cannot be made durable.
        """
        shown = read_commitments(self.draw, data)

        def note(document: Document) -> Document:
            mine = document.get(self.dataset, {})
            self._check_context(mine)
            if "secret" not in mine:
                raise OutOfOrder(
                    "was shown commitments before it was asked for its own"
                )
            own = self.draw.commitment(self._number, bytes.fromhex(mine["secret"]))
            if shown[self._number] != own:
                raise DrawRefused("another commitment of this site is shown")
            if "commitments" in mine:
                self._check_same(shown, _commitments(mine))
                return document
            listed = {str(number): value.hex() for number, value in shown.items()}
            facts = {
                "context": self.draw.context.hex(),
                "sites": list(self.draw.sites),
                "num_groups": self.draw.num_groups,
                "commitments": listed,
            }
            return {**document, self.dataset: {**mine, **facts}}

        after = self.memory.update(DOCUMENT, note)
        secret = bytes.fromhex(after[self.dataset]["secret"])
        return write_reveal(self._number, secret)

    def take_offer(self, data: bytes) -> tuple[Group, bytes]:
        """Find this site's group, and the offer of the contract that must be its.

        Raises:
            DrawRefused: Secrets do not belong to the commitments that are noted.
            OutOfOrder: This site has revealed nothing yet.
            MalformedMessage: The bytes are not the offer of a group's contract.
            StoreError: The memory cannot be read.
        """
        secrets, offer = read_group_offer(data)
        mine = self.memory.read(DOCUMENT).get(self.dataset, {})
        self._check_context(mine)
        if "commitments" not in mine:
            raise OutOfOrder("was offered a contract before groups were drawn")
        outcome = outcome_of(self.draw, _commitments(mine), secrets)
        group = frozenset(outcome.group_of(self.site))
        return Group(sites=group, partition=outcome.digest), offer

    @property
    def _number(self) -> int:
        return self.draw.sites.index(self.site) + 1

    def _check_context(self, mine: Document) -> None:
        """Check that what is drawn is what was drawn before, if anything was."""
        known = mine.get("context")
        if known is not None and known != self.draw.context.hex():
            raise DrawRefused(
                f"has drawn {mine['num_groups']} groups of {', '.join(mine['sites'])} "
                "for runs on these data, and takes part in no other draw: whoever "
                "could have groups drawn again could choose them. Run with the same "
                "sites and number of groups; or have every operator remove "
                f"memory/{DOCUMENT}.json"
            )

    def _check_same(
        self, shown: Mapping[int, bytes], known: Mapping[int, bytes]
    ) -> None:
        changed = [
            member.site
            for member in self.draw.members
            if shown[member.number] != known[member.number]
        ]
        if changed:
            raise DrawRefused(
                f"{', '.join(changed)} committed to another secret than when the "
                "groups of these data were drawn: a site has lost its memory, or the "
                "aggregator wants other groups. If every operator agrees to draw "
                f"again, each removes memory/{DOCUMENT}.json"
            )


def _commitments(mine: Document) -> dict[int, bytes]:
    listed = mine["commitments"]
    return {int(number): bytes.fromhex(value) for number, value in listed.items()}
