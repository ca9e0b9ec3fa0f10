"""Sites that train fewer ranks of adapters; see ``federation.job.adapter_ranks``."""

from federation.methods.method import Method, Thing

FEWER_RANKS = Method(
    name=Thing.FEWER_RANKS,
    key=("sites", "lora_rank"),
    excludes={
        Thing.TRAINER: "a Trainer's loop trains all ranks",
        Thing.FLOWER_APPS: "Flower apps know one rank only",
        Thing.RELAYS: "relays know one rank only",
        Thing.GROUPS: (
            "sites of one group may all have a small rank, and the rest would be of "
            "few sites"
        ),
        Thing.ROBUST: (
            "other rules compare values of sites, and this site sends 0 for the rest: "
            "set aggregation.combine to mean or contributor_mean"
        ),
        Thing.OVERLAP: (
            "steps taken ahead mix older values into what the site does not train"
        ),
    },
    private_because="sums are refused in which too few sites fill a part",
)
