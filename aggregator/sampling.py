"""Which sites take part in a round."""

import numpy as np

from federation.ids import SiteId
from federation.job.spec import JobSpec

# Keeps this draw apart from others that start from the job's seed.
_COHORT_STREAM = 0xC0480


def draw_cohort(job: JobSpec, round_index: int) -> tuple[SiteId, ...]:
    """Draw the sites of a round, in the order of the job.

    All of them, unless ``schedule.sites_per_round`` says how many: then every set
    of that size is equally likely. A pure function of the job and the round, so a
    resumed run asks the same sites again. Anyone who knows the seed can foretell
    the cohorts: they amplify no privacy.

    Args:
        job: The job; its seed starts the draw.
        round_index: 1 for the first round.
    """
    entropy = [job.seed, round_index, _COHORT_STREAM]
    generator = np.random.default_rng(np.random.SeedSequence(entropy))
    drawn = generator.choice(len(job.sites), size=job.cohort_size, replace=False)
    return tuple(SiteId(job.sites[i].name) for i in sorted(drawn))
