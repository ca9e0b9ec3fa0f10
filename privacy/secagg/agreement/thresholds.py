"""How many sites must take part, and how many colluding ones that tolerates.

Source: the protocol, section 2.1. N sites, threshold t, n_C sites that collude with
the aggregator. ``2 t > N + n_C`` keeps a lying aggregator from opening two different
sums of one round (Bonawitz et al., eprint 2017/281, section 6.3).
"""


def smallest_threshold(num_sites: int) -> int:
    """Smallest threshold allowed, t = floor(2N/3) + 1 (section 2.1)."""
    return 2 * num_sites // 3 + 1


def colluding_tolerated(num_sites: int, threshold: int) -> int:
    """Most sites n_C that may collude with the aggregator (section 2.1).

    P1: all but two, since at least two honest updates must be in the sum.
    P2: largest n_C with ``2 t > N + n_C``; t - n_C honest updates are in every sum.
    """
    if threshold == num_sites:
        return num_sites - 2
    return 2 * threshold - num_sites - 1
