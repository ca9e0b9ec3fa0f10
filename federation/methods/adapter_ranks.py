"""Sites that train fewer ranks of adapters; see ``federation.job.adapter_ranks``."""

from federation.methods.method import Method, Thing

FEWER_RANKS = Method(
    name=Thing.FEWER_RANKS,
    key="sites.lora_rank",
    excludes={
        "a Trainer's loop trains all ranks": Thing.TRAINER,
        "Flower apps know one rank only": Thing.FLOWER_APPS,
        "relays know one rank only": Thing.RELAYS,
        "sites of one group may all have a small rank, so few sites fill the rest": (
            Thing.GROUPS,
            Thing.FREE_SUMS,
        ),
        "other rules compare sites, and this one sends 0 for the rest: set "
        "aggregation.combine to mean or contributor_mean": (
            Thing.ROBUST,
            Thing.OWN_RULE,
        ),
        "steps taken ahead mix older values into what the site does not "
        "train": Thing.OVERLAP,
    },
    private_because="sums are refused in which too few sites fill a part",
)
