"""Which parameters ``muon`` steps, and which it leaves to AdamW."""

import pytest
import torch
from support.small_jobs import small_job
from torch import nn

from clients.float32_muon import Float32Muon
from clients.models import digits_cnn, gpt, mlp
from clients.models.hidden_matrices import hidden_matrices
from clients.models.model_pool import ModelPool
from clients.training.local_steps import make_optimizers
from federation.errors import JobError
from federation.job.spec import OptimizerSpec

MUONS = (Float32Muon, getattr(torch.optim, "Muon", Float32Muon))
MUON = OptimizerSpec(name="muon", momentum=0.95, lr=0.1)

needs_muon = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9"
)


class Untied(nn.Module):
    """Tables, a hidden layer with bias and gain, and a head that comes first."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if first:
            self.head = nn.Linear(8, 11)
        self.tokens = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.zeros(5, 8))
        self.bag = nn.EmbeddingBag(11, 8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.LayerNorm(8)
        if not first:
            self.head = nn.Linear(8, 11)


ATTENTION = ["attention.in_proj_weight", "attention.out_proj.weight"]


def names(model: nn.Module, *patterns: str) -> list[str]:
    spec = OptimizerSpec(name="muon", momentum=0.9, adamw_parameters=patterns)
    return list(hidden_matrices(model, spec))


def test_of_tied_weights_the_embedding_is_left_out_and_no_hidden_matrix():
    """The head has the embedding's matrix; the last block's matrices are hidden."""
    model = gpt(vocabulary=16, context=4, layers=2, heads=1, width=8)
    matrices = ("attention.qkv", "attention.out", "mlp.wide", "mlp.out")
    assert names(model) == [f"blocks.{i}.{m}.weight" for i in (0, 1) for m in matrices]


def test_tables_gains_biases_and_the_head_are_left_out():
    """Also a table that is a parameter of the model's own."""
    assert names(Untied(first=False)) == ATTENTION


def test_a_head_that_comes_first_is_named_by_a_pattern():
    """Else the last matrix is taken for it, and it for a hidden one."""
    assert names(Untied(first=True)) == ["head.weight", ATTENTION[0]]
    assert names(Untied(first=True), "head.*") == [ATTENTION[0]]


def test_convolutions_are_left_out_and_may_be_the_head():
    """Torch's Muon steps matrices alone; before a convolution no matrix is the head."""
    convolutions = digits_cnn(width=2)[:5]
    model = nn.Sequential(convolutions, nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3))
    assert names(model) == ["2.weight"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.Conv1d(2, 2, 1))) == ["0.weight"]


def test_frozen_matrices_stay_and_still_show_where_the_head_is():
    """Low-rank updates of a frozen model: the last one is no head."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(requires_grad=False)
    model[2].requires_grad_(requires_grad=False)
    assert names(model) == ["1.weight"]


@pytest.mark.parametrize(
    "model", [nn.Linear(4, 3), nn.Embedding(3, 4), digits_cnn(width=2)]
)
def test_a_model_without_hidden_matrix_is_refused(model: nn.Module):
    """Muon would step nothing."""
    with pytest.raises(JobError, match="this model has none") as caught:
        hidden_matrices(model, MUON)
    assert caught.value.key == "training.optimizer.name"


def test_a_pattern_that_fits_nothing_is_refused():
    """A bias is no weight matrix: AdamW has it anyway."""
    with pytest.raises(JobError, match=r"'0.bias' fits no weight matrix") as caught:
        names(mlp(4, 3), "0.bias")
    assert caught.value.key == "training.optimizer.adamw_parameters"


def test_a_pool_refuses_before_the_first_round():
    """The job cannot be trained, whoever has how much data."""
    training = {"local_steps": 1, "optimizer": {"name": "muon", "momentum": 0.9}}
    with pytest.raises(JobError, match="this model has none"):
        ModelPool(small_job(training=training))


@needs_muon
def test_each_trained_parameter_has_one_optimiser():
    """Muon's and AdamW's parts are apart, and nothing is left."""
    model = gpt(vocabulary=16, context=4, layers=1, heads=1, width=8)
    model.get_submodule("positions").requires_grad_(requires_grad=False)
    muon, adamw = make_optimizers(model, MUON)
    assert isinstance(muon, MUONS)
    assert isinstance(adamw, torch.optim.AdamW)
    stepped = [p for o in (muon, adamw) for g in o.param_groups for p in g["params"]]
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sorted(map(id, stepped)) == sorted(map(id, trained))


@needs_muon
def test_a_model_of_hidden_matrices_alone_needs_no_adamw():
    """Its head is frozen, for example."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3))
    model[1].requires_grad_(requires_grad=False)
    (only,) = make_optimizers(model, MUON)
    assert isinstance(only, MUONS)
