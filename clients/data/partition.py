"""Split one dataset among the sites of a simulation.

Every example goes to exactly one site, in the training part and in the held-out
part alike. Real sites bring their own data, so this is not used there.

Shape suffixes: n examples, k sites, c classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from clients.data.persons import numbered_alike
from federation.errors import SiteError
from federation.job.spec import PartitionSpec

if TYPE_CHECKING:
    from clients.data import Dataset

Indices = NDArray[np.int64]
Parts = list[tuple[Indices, Indices]]

MAX_DRAWS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelCounts:
    """The sites' examples by class or by group.

    Attributes:
        kind: ``class``, ``group``, or empty if the data has neither.
        labels: Names of the classes or groups that occur.
        by_site: For each site, its number of examples of each label.
    """

    kind: str
    labels: tuple[str, ...]
    by_site: tuple[tuple[int, ...], ...]


def partition(
    train: "Dataset",
    held_out: "Dataset",
    spec: PartitionSpec,
    *,
    site_names: Sequence[str],
    rng: np.random.Generator,
) -> list[tuple[Indices, Indices]]:
    """Split a dataset among sites.

    - ``iid``: at random, in parts that are equal to within one example.
    - ``stratified``: the same, and equal to within one example in each class.
    - ``dirichlet``: each class by shares from a Dirichlet distribution, after
      arXiv:1909.06335 (Hsu, Qi, Brown 2019), section 3.1. There a site draws its
      mix of classes; here a class draws its shares of the sites, as in
      arXiv:1905.12022, section 4, which deals every example out. Training and
      held-out part follow the same shares.
    - ``by_group``: whole groups, the largest first to the site that has least.
    - ``by_person``: the same with all records of a person, training and held out.
    - ``proportional``: at random, in parts that are proportional to the sites'
      speeds to within one example, so that all are done at the same time.

    Args:
        train: Training examples.
        held_out: Held-out examples.
        spec: Kind of partition.
        site_names: The sites, in the order of the result.
        rng: Where chance comes from; the result depends on nothing else.

    Returns:
        For each site the indices of its training and of its held-out examples,
        in ascending order.

    Raises:
        SiteError: The data has no classes or groups to go by, or a site would get
            too few examples.
    """
    k = len(site_names)
    if spec.kind == "by_group":
        parts = _by_group(train, held_out, k)
    elif spec.kind == "by_person":
        parts = _by_person(train, held_out, k)
    else:
        train_c, held_c = _shuffled_classes(train, held_out, spec, rng)
        if spec.kind == "proportional":
            shares_ck = np.array([spec.speeds]) / sum(spec.speeds)
            parts = list(
                zip(_cut(train_c, shares_ck), _cut(held_c, shares_ck), strict=True)
            )
        elif spec.kind == "dirichlet":
            parts = _by_drawn_shares(train_c, held_c, spec, k, rng)
        else:
            parts = list(zip(_evenly(train_c, k), _evenly(held_c, k), strict=True))
    _check_parts(parts, spec, site_names)
    return [(np.sort(t), np.sort(h)) for t, h in parts]


def count_labels(sites: Sequence["Dataset"]) -> LabelCounts:
    """Count the examples of each site by class, or else by group.

    Args:
        sites: The training examples of each site; there may be none.
    """
    classes = [site.labels() for site in sites]
    if classes and all(c is not None for c in classes):
        names = [[str(v) for v in c.tolist()] for c in classes if c is not None]
        order = np.unique(np.concatenate([c for c in classes if c is not None]))
        return _count("class", [str(v) for v in order.tolist()], names)
    groups = [(site.groups, site.group_names) for site in sites]
    if groups and all(g is not None for g, _ in groups):
        names = [[n[i] for i in g.tolist()] for g, n in groups if g is not None]
        return _count("group", sorted({n for site in names for n in site}), names)
    return LabelCounts(kind="", labels=(), by_site=((),) * len(sites))


def _count(kind: str, labels: list[str], names: list[list[str]]) -> LabelCounts:
    place = {label: i for i, label in enumerate(labels)}
    rows = (
        np.bincount([place[n] for n in site], minlength=len(labels)) for site in names
    )
    return LabelCounts(
        kind=kind,
        labels=tuple(labels),
        by_site=tuple(tuple(row.tolist()) for row in rows),
    )


def _shuffled_classes(
    train: "Dataset",
    held_out: "Dataset",
    spec: PartitionSpec,
    rng: np.random.Generator,
) -> tuple[list[Indices], list[Indices]]:
    """Indices of each class in random order; one class where it does not matter."""
    if spec.kind in {"iid", "proportional"}:
        return [rng.permutation(len(train))], [rng.permutation(len(held_out))]
    sides = train.labels(), held_out.labels()
    if sides[0] is None or sides[1] is None:
        raise SiteError(
            f"partition kind {spec.kind!r} splits by class, but the data has no "
            "integer targets (or, as a map-style dataset, no attribute `targets`): use "
            "iid or by_group"
        )
    train_n, held_n = sides[0], sides[1]
    train_c, held_c = [], []
    for label in np.union1d(train_n, held_n):
        train_c.append(rng.permutation(np.flatnonzero(train_n == label)))
        held_c.append(rng.permutation(np.flatnonzero(held_n == label)))
    return train_c, held_c


def _evenly(members_c: Sequence[Indices], num_sites: int) -> list[Indices]:
    # Like cards, class after class: equal to within one card of each class, and to
    # within one card of all.
    order = np.concatenate(members_c)
    return [order[site::num_sites] for site in range(num_sites)]


def _by_drawn_shares(
    train_c: Sequence[Indices],
    held_c: Sequence[Indices],
    spec: PartitionSpec,
    num_sites: int,
    rng: np.random.Generator,
) -> Parts:
    """Draw until every site has enough; the caller checks the last draw."""
    parts: Parts = []
    for _ in range(MAX_DRAWS):
        shares_ck = rng.dirichlet(np.full(num_sites, spec.alpha), size=len(train_c))
        parts = list(
            zip(_cut(train_c, shares_ck), _cut(held_c, shares_ck), strict=True)
        )
        if all(len(t) >= spec.min_examples and len(h) for t, h in parts):
            break
    return parts


def _cut(members_c: Sequence[Indices], shares_ck: NDArray[np.float64]) -> list[Indices]:
    """Cut each class at the sites' cumulative shares, rounded to whole examples."""
    pieces_ck = []
    for members, shares_k in zip(members_c, shares_ck, strict=True):
        pieces_ck.append(np.split(members, cuts(shares_k, len(members))))
    return [np.concatenate(of_site) for of_site in zip(*pieces_ck, strict=True)]


def cuts(shares_k: NDArray[np.float64], num_examples: int) -> Indices:
    """Where one site's examples end and the next one's begin, shape ``(k - 1,)``."""
    return np.rint(np.cumsum(shares_k)[:-1] * num_examples).astype(np.int64)


def _by_group(train: "Dataset", held_out: "Dataset", num_sites: int) -> Parts:
    train_n, held_n = train.groups, held_out.groups
    if train_n is None or held_n is None:
        raise SiteError(
            "partition kind 'by_group' assigns whole groups, but the data has none: "
            "return clients.data.Examples with `groups`, or use another kind"
        )
    if train.group_names != held_out.group_names:
        raise SiteError(
            "the training and the held-out data have different groups: give both the "
            "same group_names"
        )
    sizes = np.bincount(train_n, minlength=len(train.group_names))
    num_groups = np.count_nonzero(sizes)
    if num_groups < num_sites:
        raise SiteError(
            f"{num_groups} groups with training examples cannot be assigned to "
            f"{num_sites} sites: use fewer sites or another partition kind"
        )
    # Largest group first; if that leaves a site without held-out data, those groups
    # first that have some.
    without = np.bincount(held_n, minlength=len(sizes)) == 0
    parts: Parts = []
    for order in (np.argsort(-sizes, kind="stable"), np.lexsort((-sizes, without))):
        site_of_group = _dealt_to_least(sizes, order, num_sites)
        parts = [
            (
                np.flatnonzero(site_of_group[train_n] == site),
                np.flatnonzero(site_of_group[held_n] == site),
            )
            for site in range(num_sites)
        ]
        if all(len(held) for _, held in parts):
            break
    return parts


def _by_person(train: "Dataset", held_out: "Dataset", num_sites: int) -> Parts:
    train_ids, held_ids = train.persons, held_out.persons
    if train_ids is None or held_ids is None:
        raise SiteError(
            "partition kind 'by_person' assigns all records of a person to one site, "
            "but the data does not name persons: return clients.data.Examples with "
            "`persons`, or use another kind"
        )
    train_n, held_n = numbered_alike(train_ids, held_ids)
    num_persons = 1 + max(train_n.max(initial=-1), held_n.max(initial=-1))
    trained = np.bincount(train_n, minlength=num_persons)
    held = np.bincount(held_n, minlength=num_persons)
    site_of = _dealt_to_least(trained, np.argsort(-trained, kind="stable"), num_sites)
    # Persons who are held out and not trained on are dealt by themselves.
    rest = np.flatnonzero(trained == 0)
    order = np.argsort(-held[rest], kind="stable")
    site_of[rest] = _dealt_to_least(held[rest], order, num_sites)
    return [
        (np.flatnonzero(site_of[train_n] == k), np.flatnonzero(site_of[held_n] == k))
        for k in range(num_sites)
    ]


def _dealt_to_least(sizes: Indices, order: Indices, num_sites: int) -> Indices:
    """Give each group in turn to the site that has fewest examples so far."""
    site_of_group = np.zeros(len(sizes), dtype=np.int64)
    load_k = np.zeros(num_sites, dtype=np.int64)
    for group in order:
        site_of_group[group] = site = np.argmin(load_k)
        load_k[site] += sizes[group]
    return site_of_group


def _check_parts(parts: Parts, spec: PartitionSpec, site_names: Sequence[str]) -> None:
    drawn = spec.kind == "dirichlet"
    note = f" ({MAX_DRAWS} draws all gave some site too few)" if drawn else ""
    remedy = "raise alpha, " if drawn else ""
    for (train, held_out), name in zip(parts, site_names, strict=True):
        if len(train) < spec.min_examples:
            raise SiteError(
                f"site {name!r} gets {len(train)} training examples and needs "
                f"{spec.min_examples}{note}: {remedy}lower min_examples, use fewer "
                "sites or more data"
            )
        if len(held_out) == 0:
            raise SiteError(
                f"site {name!r} gets no held-out example{note}: {remedy}hold out a "
                "larger share, or use fewer sites"
            )
