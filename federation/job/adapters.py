"""The factors of low-rank adapters, for an aggregator that averages their products."""

from collections.abc import Iterable
from dataclasses import dataclass

from federation.errors import JobError
from federation.job.spec import JobSpec, ServerOptimizerSpec
from federation.methods.method import Thing
from federation.methods.registry import excluding
from federation.vectors import Layout, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """One adapter ``scale * B A`` beside a weight, by names of the model's state.

    Attributes:
        weight: The weight, of shape ``(outputs, inputs)`` unless it is transposed.
        a: A, of shape ``(rank, inputs)``.
        b: B, of shape ``(outputs, rank)``.
        scale: What the product is multiplied by.
        transposed: Whether the weight has shape ``(inputs, outputs)``.
        refactored: Whether the aggregator makes new factors of the mean of products;
            otherwise it adds what their mean misses to the weight.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool = False
    refactored: bool = False


def check_factors(factors: Iterable[Factors], layout: Layout) -> None:
    """Refuse adapters of which the aggregator could not average the products.

    Args:
        factors: All adapters.
        layout: Layout of the model.

    Raises:
        JobError: A factor stays at its site, or a weight is also that of another layer.
    """
    roles = {spec.name: spec.role for spec in layout.tensors}
    for each in factors:
        for name in (each.a, each.b):
            if roles.get(name) is Role.PERSONAL:
                raise JobError(
                    f'with method = "fedex" or "svd", the aggregator needs {name!r} of '
                    'each site: leave it out here, or use method = "ffa" or "plain"',
                    key="model.personal",
                )
        if not each.refactored and each.weight not in roles:
            raise JobError(
                f'with method = "fedex", the aggregator changes {each.weight!r}, which '
                "is also the weight of another layer (tied): name other layers, or use "
                'another method, such as "svd"',
                key="model.options.lora.targets",
            )


def check_exact(job: JobSpec) -> None:
    """Refuse jobs in which the mean of products is not what the aggregator computes.

    Raises:
        JobError: The first reason.
    """
    optimizer, links = job.aggregation.server_optimizer, job.communication.links
    step = ServerOptimizerSpec()
    faults = {
        **{reason: True for _, reason in excluding(job, Thing.EXACT_ADAPTERS)},
        f"aggregation.combine is {job.aggregation.combine}, not mean": (
            job.aggregation.combine != "mean"
        ),
        "the server optimiser would step factors and products differently: leave out "
        "aggregation.server_optimizer": (
            (optimizer.name, optimizer.lr) != (step.name, step.lr)
        ),
        "codecs round the factors: leave out communication.codec and down_codec": (
            {links.up.name, links.down.name} != {"identity"}
        ),
    }
    for reason, is_refused in faults.items():
        if is_refused:
            raise JobError(
                f'with method = "fedex" or "svd", {reason}; or use method = "ffa", '
                "whose sums are exact everywhere",
                key="model.options.lora.method",
            )
