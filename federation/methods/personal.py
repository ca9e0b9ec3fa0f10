"""Parts of a model that stay at each site, and clusters, which are made of them.

See ``clients.models.personal`` and ``clients.models.clusters``. Private steps of
records noise the personal part like the rest: the next gradient depends on it. In a
joint round only the sum has noise, and the personal part is in no sum. Where whole
sites are protected only the shared update has noise, and results of the site's own
model would reveal the rest.
"""

from federation.methods.method import ONE_RANK, Method, Thing

PERSONAL = Method(
    name=Thing.PERSONAL,
    key="model.personal",
    excludes={
        "noise is only in the sum, so personal parts would carry records into the "
        'next update: use unit = "record"': Thing.JOINT,
        "a site evaluates its own model, whose personal part has no noise: set "
        "evaluation.every = 0": Thing.SITE_RESULTS,
        "steps taken ahead begin with the site's own whole model": Thing.OVERLAP,
        "normalized_steps scales what is averaged, and personal parts are "
        "not": Thing.NORMALIZED,
        "sites keep the personal parts of the last round, which belong to no other "
        "model: set selection.model to 'last', which stops early "
        "too": Thing.OTHER_MODEL,
        ONE_RANK: Thing.RANKS,
    },
    private_because="private steps of records noise personal parts too",
)
CLUSTERS = Method(
    name=Thing.CLUSTERS,
    key="training.task",
    on=("clients.models.clusters:best_cluster",),
    always_decides=True,
    instead="use one model",
    excludes={
        'each site chooses a cluster for itself: add "choice.*" to '
        "model.personal": Thing.SHARED_CHOICE,
        "a cluster that one site chooses holds its update alone, and the aggregator "
        'can steer the choice: use unit = "site", do without secure '
        "aggregation": Thing.OPEN_SUMS,
        "a site chooses a cluster by losses of its records, which have no noise: use "
        'unit = "site"': Thing.RECORDS,
    },
    private_because="noise for whole sites covers the choice",
)
