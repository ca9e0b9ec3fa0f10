"""Arguments of a configuration that transformers would ignore."""

import pytest

from clients.models.pretrained import refuse_misspelt
from federation.errors import JobError


class Common:
    """What every configuration takes."""

    def __init__(self, *, layer_norm: float = 1e-5, **_others: object) -> None:
        self.norm = layer_norm

    num_labels = 2


class Configuration(Common):
    """As a class of transformers: some names are others of the same."""

    attribute_map = {"hidden_size": "n_embd"}  # noqa: RUF012 -- as transformers has it.

    def __init__(self, n_embd: int = 8, n_layer: int = 2, **others: object) -> None:
        super().__init__(**others)
        self.width, self.num_layer = n_embd, n_layer


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
        refuse_misspelt(Configuration, {name: 3, "n_embd": 4}, key="config")
    assert caught.value.key == f"config.{name}"


def test_other_names_pass():
    """Arguments, attributes, special tokens, and what only some models read.

    ``num_layer`` is computed, and near to ``n_layer``.
    """
    known = ["n_embd", "hidden_size", "num_labels", "layer_norm", "num_layer"]
    given = dict.fromkeys([*known, "sep_token_id", "rope_theta"], 1)
    refuse_misspelt(Configuration, given, key="config")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        ("bert", "n_layers", "num_hidden_layers"),
        ("bert", "n_heads", "num_attention_heads"),
        ("distilbert", "num_hidden_layer", "num_hidden_layers"),
        ("llama", "n_layer", "num_hidden_layers"),
        ("gpt2", "n_layers", "n_layer"),
        ("gpt2", "n_head", ""),
        ("llama", "rope_theta", ""),
        ("bert", "torch_dtype", ""),
        ("bert", "gradient_checkpointing", ""),
    ],
)
def test_names_of_other_models_are_refused(kind: str, name: str, meant: str):
    """Unless something in transformers reads them."""
    configurations = pytest.importorskip("transformers").CONFIG_MAPPING
    if not meant:
        refuse_misspelt(configurations[kind], {name: 1}, key="config")
        return
    with pytest.raises(JobError, match=f"no '{name}', .*mean '{meant}'"):
        refuse_misspelt(configurations[kind], {name: 1}, key="config")
