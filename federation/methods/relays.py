"""Relays between sites and the aggregator; see ``aggregator.relay``."""

from federation.methods.method import Method, Thing

RELAYS = Method(
    name=Thing.RELAYS,
    key="relays",
    excludes={
        "groups are drawn by the sites, and a relay has fixed sites": Thing.GROUPS,
        "other rules compare sites, and a relay sends their mean": Thing.OTHER_COMBINE,
        "a relay would have to encode its sites' mean again, and leave out more: set "
        "communication.codec to identity, use secure aggregation with "
        "levels": Thing.CODECS_UP,
        "a relay asks all its sites in each round": Thing.SAMPLES,
        "they send no factors of single sites": Thing.EXACT_ADAPTERS,
    },
    private_because="the aggregator learns less of a site than without",
)
