"""Which layers of a model are gathered at a time, and which models can be cut."""

import pytest
import torch
from support.small_jobs import small_job
from torch import nn

from clients.models import gpt
from clients.models.weights import layout_of
from clients.ranks.checks import check_devices, check_shardable
from clients.ranks.placing import units_of
from federation.errors import JobError, SiteError
from federation.job.spec import JobSpec


class Scaled(nn.Module):
    """A layer with a parameter that has no rows, or one of another type."""

    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(scale)


def test_blocks_are_gathered_one_by_one():
    """What is outside of lists, as embeddings, belongs to the model as a whole."""
    model = gpt(vocabulary=8, context=4, layers=3, heads=1, width=4)
    assert list(model.get_submodule("blocks")) == list(units_of(model))  # type: ignore[call-overload]


def test_layers_that_share_a_parameter_stay_together():
    """Cut apart, it would be two."""
    tied, free = nn.Linear(2, 2), nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    other.weight = tied.weight
    assert [free] == list(units_of(nn.Sequential(tied, free, other)))


@pytest.mark.parametrize(
    ("scale", "reason"),
    [
        (torch.tensor(1.0), "'scale' is a single number"),
        (torch.ones(2, dtype=torch.bfloat16), "parameters of bfloat16 and float32"),
    ],
)
def test_what_cannot_be_cut_is_refused(scale: torch.Tensor, reason: str):
    """The message says what to change."""
    with pytest.raises(JobError, match=reason) as caught:
        check_shardable(layout_of(Scaled(scale), {}))
    assert caught.value.key == "model.factory"
    check_shardable(layout_of(Scaled(torch.ones(1)), {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_a_job_for_gpus_finds_them_or_is_refused():
    """Ranks do not fall back to the CPU where a GPU is asked for."""
    check_devices(job_on("cpu"), 2)
    check_devices(job_on("auto"), 2)
    with pytest.raises(SiteError, match="need a GPU each, and there are 0"):
        check_devices(job_on("cuda"), 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
@pytest.mark.parametrize("can_shard", [False, True])
def test_an_old_torch_shards_no_model_on_cpus(
    *, can_shard: bool, monkeypatch: pytest.MonkeyPatch
):
    """Said before ranks start, which would fail in the first round."""
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    if can_shard:
        monkeypatch.setattr(torch.cpu.Stream, "record_event", None, raising=False)
        check_devices(job_on("cpu"), 2, is_sharded=True)
        return
    check_devices(job_on("cpu"), 2)
    with pytest.raises(SiteError, match=r"on CPUs: upgrade torch"):
        check_devices(job_on("cpu"), 2, is_sharded=True)


def job_on(device: str) -> JobSpec:
    return small_job(
        training={"local_steps": 1, "device": device, "optimizer": {"lr": 0.5}}
    )
