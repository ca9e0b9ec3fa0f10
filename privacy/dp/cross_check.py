"""A second computation of epsilon, by another library with other mathematics.

Opacus's accountant by privacy loss random variables (Gopi, Lee and Wutschitz,
arXiv:2106.02848). Nothing is decided by it: it is printed beside the ledger's epsilon,
and tests hold the two together.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass

from privacy.dp.events import PrivacyEvent, total_slack

EPSILON_ERROR = 0.01
_DELTA_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class CrossCheck:
    """Epsilon according to Opacus.

    Attributes:
        estimate: Epsilon as estimated.
        upper: The bound that it guarantees: about ``EPSILON_ERROR`` more.
    """

    estimate: float
    upper: float


def epsilon(events: Iterable[PrivacyEvent], delta: float) -> CrossCheck:
    """Epsilon of all events together, by privacy loss random variables.

    Args:
        events: What was released; at least one.
        delta: In (0, 1).

    Raises:
        ValueError: There is no event, slack uses up delta, or delta is too small for
            the method.
    """
    # Imports torch.
    from opacus.accountants.analysis import prv  # noqa: PLC0415

    events = tuple(events)
    delta -= total_slack(events)
    if not events or delta <= 0:
        raise ValueError(
            f"there is no epsilon for {len(events)} events and a delta of {delta}"
        )
    variables = [
        prv.PoissonSubsampledGaussianPRV(event.sampling_rate, event.noise_multiplier)
        for event in events
    ]
    counts = [event.steps for event in events]
    delta_error = delta * _DELTA_SHARE
    with warnings.catch_warnings():
        # Its way to a window warns of orders (RuntimeWarning: log(0) without
        # sampling); a window that is wider than needed does no harm.
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", RuntimeWarning)
        half = prv.compute_safe_domain_size(
            variables, counts, eps_error=EPSILON_ERROR, delta_error=delta_error
        )
        # The mesh of arXiv:2106.02848, section 5, as Opacus's own accountant has it.
        mesh = EPSILON_ERROR / math.sqrt(sum(counts) * math.log(12 / delta_error) / 2)
        domain = prv.Domain.create_aligned(-half, half, mesh)
        discrete = [
            prv.discretize(
                prv.TruncatedPrivacyRandomVariable(each, domain.t_min, domain.t_max),
                domain,
            )
            for each in variables
        ]
        composed = prv.compose_heterogeneous(discrete, counts)
        _, estimate, upper = composed.compute_epsilon(delta, delta_error, EPSILON_ERROR)
    return CrossCheck(float(estimate), float(upper))
