"""Zeros of a pruned model that stay zero; see ``clients.methods.kept_zeros``."""

from federation.methods.method import Method, Thing

KEPT_ZEROS = Method(
    name=Thing.KEPT_ZEROS,
    key="model.keep_zeros",
    excludes={
        "it needs weights to start from: set model.weights": Thing.NO_WEIGHTS,
        "noise is added to every value, also to those that are zero": Thing.PRIVACY,
        "adapters begin with zeros, which would never be trained": Thing.ADAPTERS,
        "muon mixes the values of a matrix, so zeros would not stay": Thing.MUON,
        "sites must receive whole models": (Thing.CHANGES, Thing.SUMS_DOWN),
    },
)
