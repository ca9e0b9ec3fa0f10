"""Refuses an open secure sum of parts that only some sites train.

A sum hides an update among those that fill the same values. Where data, or a model
that the aggregator has made, decide which part of the model a site trains (clusters,
branches, experts), a part of the sum may hold a single site's update. No site knows
what the others train, so each one that leaves out a part declines the round.
"""

import json
from collections.abc import Collection, Mapping

import torch

from federation.errors import SiteError
from federation.job.spec import JobSpec
from federation.vectors import Layout, Role

_SHOWN = 4  # Names in the advice.


def check_filled(
    job: JobSpec,
    layout: Layout,
    named: Mapping[str, torch.nn.Parameter],
    idle: Collection[torch.nn.Parameter],
) -> None:
    """Check that a round's training has reached every part of an open secure sum.

    Args:
        job: With differential privacy, noise hides what few sites fill.
        layout: Says what is summed, which personal parts are not.
        named: The model's parameters by their names in the layout.
        idle: Trained ones that no step's gradient has reached; one of zeros counts.

    Raises:
        SiteError: Some part has no gradient here.
    """
    private = job.privacy.differential_privacy.enabled
    if private or not job.privacy.secure_aggregation.enabled or not idle:
        return
    summed = {each.name for each in layout.tensors if each.role is Role.PARAMETER}
    left = set(idle)
    names = [name for name, each in named.items() if each in left and name in summed]
    if names:
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise SiteError(
            f"training reached no gradient of {names[0]!r} here (of {len(names)} "
            "tensors), so a secure sum of it could hold the update of one other site. "
            f"If no site trains them, add {json.dumps(names[:_SHOWN])}{rest} to "
            "model.frozen; otherwise make them model.personal, use "
            'unit = "site", or do without secure aggregation'
        )
