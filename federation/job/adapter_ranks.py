"""Adapters of which some sites train fewer ranks than others.

A low-rank adapter ``B A`` of rank r is a sum of r products, of a column of B and a row
of A each. A site with ``lora_rank`` k trains the first k of them. The others stay as
the aggregator sent them, but the site computes with them, so that its model is one of
the whole rank. Hence the mean of the sites' models is what it is for equal ranks: with
a frozen A (FFA-LoRA) it is the mean of B, and columns that a site does not train add
zero to a sum. So the mean is exact in a secure sum, too.

Other methods cut the model to the site's rank. Zero-padding (HetLoRA: Cho et al. 2024,
arXiv:2401.06432, section 3.2) then shrinks columns that few sites train, and stacking
(FLoRA: Wang et al. 2024, arXiv:2409.05976, section 3) needs each site's factors.

Shape suffixes: d float values of the model.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from federation.compression.apart import fitted
from federation.compression.codec import Codec, Links
from federation.errors import JobError
from federation.ids import SiteId
from federation.job.spec import JobSpec
from federation.methods.adapter_ranks import FEWER_RANKS
from federation.vectors import AVERAGED, Layout, Role, TensorSpec

# The axis of the rank in peft's tensors, by a part of their names.
_AXES: Mapping[str, int] = {
    "lora_A": 0,
    "lora_embedding_A": 0,
    "lora_B": 1,
    "lora_embedding_B": 1,
}
# Sites of the same rank, and contributors to a column: with two, each of them knows
# the other's part.
_FEWEST_ALIKE, _FEWEST_PRIVATE = 3, 2


def rank_axis(name: str) -> int | None:
    """Axis of the rank in a tensor of a model's state; None if it is no factor."""
    *parts, last = name.split(".")
    if last == "bias":  # Of B, in peft's ``lora_bias``: it has no ranks.
        return None
    return next((_AXES[part] for part in (*parts, last) if part in _AXES), None)


def ranks_of(job: JobSpec) -> Mapping[SiteId, int]:
    """Ranks of the sites that train fewer than all, by site."""
    return {
        SiteId(site.name): site.lora_rank
        for site in job.sites
        if site.lora_rank is not None
    }


def fixed_part(name: str, rank: int) -> tuple[slice, ...] | None:
    """Index of what a site of some rank does not train of a tensor; None for nothing.

    Args:
        name: Name of the tensor, in the model's state.
        rank: Rank of the site.
    """
    axis = rank_axis(name)
    if axis is None:
        return None
    return (*(slice(None),) * axis, slice(rank, None))


def sent_places(layout: Layout, rank: int) -> NDArray[np.bool_]:
    """Mark the values that a site of some rank sends, shape ``(d,)``.

    Those are all but the columns and rows that it does not train, and tensors that the
    aggregator sets by itself.
    """
    sent_d = np.ones(layout.size, dtype=np.bool_)
    for spec in layout.tensors:
        if spec.role not in AVERAGED:
            continue
        view = sent_d[spec.offset : spec.offset + spec.size].reshape(spec.shape)
        part = fixed_part(spec.name, rank)
        if spec.role is Role.SERVER:
            view[...] = False
        elif part is not None:
            view[part] = False
    return sent_d


def links_of(job: JobSpec, layout: Layout, rank: int | None) -> Links:
    """Return a job's codecs as they encode updates of a site of some rank.

    And changes of a model. The rank is None for a site that trains all of them.
    """
    sent_d = None if rank is None else sent_places(layout, rank)
    return fitted(job.communication.links, layout, sent_d)


def codecs_by_site(job: JobSpec, layout: Layout) -> Mapping[SiteId, Codec]:
    """Return the codecs of updates of sites that do not send all places."""
    return {s: links_of(job, layout, rank).up for s, rank in ranks_of(job).items()}


def contributors(job: JobSpec) -> tuple[frozenset[SiteId], ...]:
    """Sites that train more than each of the smaller ranks, from the smallest on.

    A sum holds the columns and rows beyond such a rank of these sites only. Empty if
    all sites have the same rank.
    """
    ranks, names = ranks_of(job), [SiteId(site.name) for site in job.sites]
    found = (
        frozenset(name for name in names if ranks.get(name, low + 1) > low)
        for low in sorted(set(ranks.values()))
    )
    return tuple(sites for sites in found if sites)


def fewest_contributors(job: JobSpec) -> int:
    """Fewest updates in any value of a sum, if as many sites drop out as may."""
    absent = len(job.sites) - job.minimum_sites
    return min(len(sites) for sites in (*contributors(job), job.sites)) - absent


def fewest_alike(job: JobSpec) -> int:
    """Fewest sites that have the same rank."""
    return min(Counter(site.lora_rank for site in job.sites).values())


def check_ranks(job: JobSpec) -> None:
    """Refuse secure sums of which a part would hold the update of few sites.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    places = FEWER_RANKS.places(job)
    secure, private = job.privacy.secure_aggregation, job.privacy.differential_privacy
    if not places or not secure.enabled:
        return
    key = places[0]
    absent = len(job.sites) - job.minimum_sites
    if private.enabled:
        if fewest_contributors(job) < _FEWEST_PRIVATE:
            raise JobError(
                "a part of the secure sum could hold the update of a single site: "
                "give a larger rank to more sites",
                key=key,
            )
        return
    few = fewest_alike(job)
    if few - absent < _FEWEST_ALIKE:
        raise JobError(
            f"{few} of {len(job.sites)} sites have the same rank, of which {absent} "
            "may drop out, and sums of two runs with other ranks could single them "
            f"out: give each rank to at least {_FEWEST_ALIKE + absent} sites, or use "
            "differential privacy",
            key=key,
        )


def check_adapters(job: JobSpec, layout: Layout) -> None:
    """Refuse ranks by site that the model's adapters do not have.

    Args:
        job: Names the ranks of its sites.
        layout: Layout of its model.

    Raises:
        JobError: The model has no adapters, they have too small a rank, or no site
            trains the last of them.
    """
    ranks = ranks_of(job)
    if not ranks:
        return
    found = [_rank(spec) for spec in layout.tensors if rank_axis(spec.name) is not None]
    most = max(found, default=0)
    for index, site in enumerate(job.sites):
        if site.lora_rank is not None and site.lora_rank >= most:
            reason = f"the model's adapters have rank {most}: choose a smaller one"
            if not found:
                reason = "the model has no adapters: set model.options.lora"
            raise JobError(
                f"{reason}, or remove this key", key=f"sites[{index}].lora_rank"
            )
    if len(ranks) == len(job.sites):
        raise JobError(
            f"no site trains all {most} ranks: remove the largest sites.lora_rank, or "
            f"use rank = {max(ranks.values())} here",
            key="model.options.lora.rank",
        )


def _rank(spec: TensorSpec) -> int:
    axis = rank_axis(spec.name)
    assert axis is not None  # noqa: S101 -- as its caller has seen
    return spec.shape[axis]
