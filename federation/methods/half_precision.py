"""Training in float16, with a scaled loss; see ``clients.methods.half_precision``."""

from federation.methods.method import Method, Thing

FLOAT16 = Method(
    name=Thing.FLOAT16,
    key="training.precision",
    on=("fp16",),
    always_decides=True,
    keeps=True,
    needs_dense=True,
    instead='use "bf16"',
    excludes={
        "a step that is skipped on overflow reveals something about its records, and "
        "scaled gradients do not fit the clip norm: use unit = "
        '"site"': Thing.RECORDS,
    },
    private_because="noise for whole sites covers whatever a site's steps do",
)
