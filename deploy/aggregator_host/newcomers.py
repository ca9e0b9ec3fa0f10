"""Who has enrolled since a run began, noted in its folder by the service.

Its coordinator may not read what is new in the aggregator's own folder. What it does
with them is in ``joining``.
"""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.aggregator_host.enrolment_book import BookFile
from deploy.aggregator_host.run_queue import QueuedRun
from federation import durable_files
from federation.platform_identity import AWS, GCP
from monitoring.runs.run_folder import RunFolder
from privacy.secagg.agreement import roster
from privacy.secagg.agreement.roster import SITE

FILE = "newcomers.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomer:
    """A site that is enrolled and not in a run.

    Attributes:
        node: Flower's number for it, in decimal digits.
        cloud: Where it runs, as far as its cloud has vouched for that.
    """

    site: str
    node: str
    cloud: str = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Newcomers:
    """What the service notes.

    Attributes:
        roster: The newest roster, which pins them, as text.
        sites: In the order of their names.
    """

    roster: str
    sites: tuple[Newcomer, ...]


def note(folder: Path, working: Sequence[QueuedRun], slots: Mapping[str, int]) -> None:
    """Note for each run at work who could join it.

    A site whose slots other runs have taken is left out until one is free.

    Raises:
        FederationError: The aggregator's record is damaged, or the disk is full.
    """
    if not working:
        return
    paths = folder / "roster.toml", BookFile(folder=folder).path
    if not all(path.exists() for path in paths):  # Sites were pinned by hand.
        return
    text, enrolled = _enrolled(folder, *(path.stat().st_mtime_ns for path in paths))
    taken = Counter(site for one in working for site in one.request.sites)
    free = [each for each in enrolled if taken[each.site] < slots.get(each.site, 1)]
    for one in working:
        sites = tuple(each for each in free if each.site not in one.request.sites)
        path = one.run.path / FILE
        found = Newcomers(roster=text, sites=sites)
        if (sites or path.exists()) and read(one.run) != found:
            durable_files.write_json(path, found)


@functools.lru_cache(maxsize=1)
def _enrolled(folder: Path, *_changed: int) -> tuple[str, Sequence[Newcomer]]:
    """Read the roster, and its sites that are not revoked; again once it changes."""
    members, book = roster.load(folder / "roster.toml"), BookFile(folder=folder).read()
    revoked, found = book.revoked_sites(members), list[Newcomer]()
    for entry in members.sites:
        one = book.member(entry.site)
        if entry.role == SITE and entry.site not in revoked and one is not None:
            platform = "" if one.machine is None else one.machine.platform
            cloud = platform if platform in {AWS, GCP} else "local"
            found.append(Newcomer(site=one.site, node=one.node_id, cloud=cloud))
    return roster.dumps(members), found


def read(run: RunFolder) -> Newcomers | None:
    """What was noted last; None if nothing was.

    Raises:
        CorruptObject: The file is damaged.
    """
    path = run.path / FILE
    return durable_files.read_json(path, Newcomers, advice="remove the file")
