"""The proximal term of FedProx; see ``clients.methods.proximal``."""

from federation.methods.method import Method, Thing

PROXIMAL = Method(
    name=Thing.PROXIMAL,
    key=("training", "proximal_mu"),
    off=0.0,
    always_decides=True,
    needs_dense=True,
    excludes={
        Thing.JOINT: (
            "the proximal term is zero for a single step from the global weights"
        ),
    },
    private_because="its gradient depends on no record",
)
