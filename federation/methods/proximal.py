"""The proximal term of FedProx; see ``clients.methods.proximal``."""

from federation.methods.method import Method, Thing

PROXIMAL = Method(
    name=Thing.PROXIMAL,
    key="training.proximal_mu",
    always_decides=True,
    needs_dense=True,
    excludes={
        "the proximal term is zero for a single step from the global "
        "weights": Thing.JOINT,
    },
    private_because="its gradient depends on no record",
)
