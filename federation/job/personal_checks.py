"""What a job with personal parts, or with clusters, must not request."""

from fnmatch import fnmatchcase

from federation.errors import JobError
from federation.job.spec import JobSpec

CLUSTERS = "clients.models.clusters:best_cluster"


def check_clusters(job: JobSpec) -> None:
    """Refuse clusters whose choice would be averaged, or would need noise.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    if job.training.task != CLUSTERS:
        return
    if not any(fnmatchcase("choice.losses", each) for each in job.model.personal):
        raise JobError(
            'each site chooses a cluster for itself: add "choice.*" to this list',
            key="model.personal",
        )
    secure, unit = job.privacy.secure_aggregation, job.privacy.differential_privacy.unit
    if secure.enabled and unit != "site":
        raise JobError(
            "each site fills one cluster of the sum, so a cluster that one site "
            "chooses would hold its update alone, and the aggregator can steer who "
            'chooses what: use unit = "site", whose noise hides both, or do without '
            "secure aggregation",
            key="privacy.secure_aggregation.enabled",
        )
    if job.privacy.differential_privacy.clips_gradients:
        raise JobError(
            "a site chooses a cluster by losses of its records, which have no noise: "
            'use unit = "site", or one model',
            key="privacy.differential_privacy.unit",
        )


def check_personal(job: JobSpec) -> None:
    """Refuse settings that personal parts would make unsafe or meaningless.

    Private steps of records noise the personal part like the rest: the next gradient
    depends on it. In a joint round only the sum has noise, and the personal part is in
    no sum. Where whole sites are protected only the shared update has noise, and
    results of the site's own model would reveal the rest.

    Raises:
        JobError: The first such thing, with its key and what to write instead.
    """
    if not job.model.personal:
        return
    training = job.training
    for refused, reason, key in (
        (
            job.privacy.differential_privacy.unit == "joint",
            (
                "noise is added to the sum only, so personal parts would carry records "
                'without noise into the next update: use unit = "record"'
            ),
            "privacy.differential_privacy.unit",
        ),
        (
            job.privacy.differential_privacy.unit == "site"
            and job.evaluation.every > 0,
            (
                "a site evaluates its own model, whose personal part has no noise: set "
                "this to 0"
            ),
            "evaluation.every",
        ),
        (
            training.overlap_steps > 0,
            "steps taken ahead begin with the site's own whole model: remove this key",
            "training.overlap_steps",
        ),
        (
            training.normalized_steps is not None,
            "it scales what is averaged, and personal parts are not: remove this key",
            "training.normalized_steps",
        ),
    ):
        if refused:
            raise JobError(f"the job has personal parts, and {reason}", key=key)
