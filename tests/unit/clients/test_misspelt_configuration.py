"""Arguments of a configuration that transformers would ignore."""

import pytest

from clients.models.pretrained import refuse_misspelt
from federation.errors import JobError


class Base:
    """What every configuration takes."""

    def __init__(self, *, layer_norm: float = 1e-5, **others: object) -> None: ...

    num_labels = 2


class Configuration(Base):
    """As a class of transformers: some names are others of the same."""

    attribute_map = {"hidden_size": "n_embd"}  # noqa: RUF012 -- as transformers has it.

    def __init__(self, n_embd: int = 8, n_layer: int = 2, **others: object) -> None: ...


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("n_layers", "n_layer"),
        ("hidden_sise", "hidden_size"),
        ("layer_norms", "layer_norm"),
    ],
)
def test_a_misspelt_argument_is_refused(name: str, meant: str):
    with pytest.raises(JobError, match=f"no '{name}', .*mean '{meant}'") as caught:
        refuse_misspelt(Configuration, [name], key="config")
    assert caught.value.key == f"config.{name}"


def test_other_names_pass():
    """Arguments, attributes, special tokens, and what only some models read."""
    known = ["n_embd", "hidden_size", "num_labels", "layer_norm"]
    refuse_misspelt(Configuration, [*known, "sep_token_id", "rope_theta"], key="config")
