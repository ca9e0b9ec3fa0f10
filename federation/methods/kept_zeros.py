"""Zeros of a pruned model that stay zero; see ``clients.methods.kept_zeros``."""

from federation.methods.method import Method, Thing

KEPT_ZEROS = Method(
    name=Thing.KEPT_ZEROS,
    key=("model", "keep_zeros"),
    off=False,
    excludes={
        Thing.NO_WEIGHTS: "it needs weights to start from: set model.weights",
        Thing.PRIVACY: "noise is added to every value, also to those that are zero",
        Thing.ADAPTERS: "adapters begin with zeros, which would never be trained",
        Thing.MUON: "muon mixes the values of a matrix, so zeros would not stay",
        Thing.NOT_WHOLE: "sites must receive whole models",
    },
)
