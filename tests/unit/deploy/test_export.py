"""Exports: whole when the card is there, never over another, and made again at will."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from support import event_samples
from support.faulty_store import FaultyStore
from support.small_jobs import small_job

from cloud_adapters.storage.memory import MemoryStore
from deploy.tools.export import CARD, JOB, MODEL, examine, export
from deploy.tools.export_signature import SIGNATURE, verify
from federation.errors import (
    CorruptObject,
    ObjectExists,
    RunNotFound,
    StoreError,
    StoreUnavailable,
)
from federation.event_log import EventWriter
from federation.protocols import ObjectStore
from monitoring.runs.run_folder import RunFolder
from privacy.secagg.agreement import identity

NUM_CHANGES = 6


def ended_run(folder: Path, *, value: float = 1.0) -> RunFolder:
    """A folder as a completed run leaves it, as far as an export needs it."""
    folder.mkdir()
    run = RunFolder(folder)
    with EventWriter(run.events) as log:
        for event in event_samples.two_sites(1):
            log(event)
    run.write_job(small_job(num_sites=2))
    tensors = {
        "bias": np.zeros(3, np.float16),
        "weight": np.full((2, 3), value, np.float32),
    }
    safetensors.numpy.save_file(tensors, run.model)
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return ended_run(tmp_path / "run")


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list()]


class Failing(FaultyStore):
    """Fails at the n-th change, from 0, before or after it was made."""

    def __init__(self, store: ObjectStore, number: int, *, after: bool) -> None:
        super().__init__(store)
        self.left, self.after = number, after

    def change(self, act: Callable[[], Any]) -> Any:
        self.left -= 1
        is_cut = self.left == -1
        if is_cut and not self.after:
            raise StoreUnavailable("the cable is cut")
        try:
            return act()
        finally:
            if is_cut:
                raise StoreUnavailable("the cable is cut")

    def put(self, *args: Any, **options: Any) -> Any:
        return self.change(lambda: self.store.put(*args, **options))

    def delete(self, key: str) -> None:
        self.change(lambda: self.store.delete(key))


def test_export_is_model_job_and_card(run: RunFolder):
    """All three arrive as they are here, and the card names the model's digest."""
    store = MemoryStore()
    done = export(run, store)
    assert sorted([MODEL, JOB, CARD]) == keys(store)
    assert store.read(MODEL) == run.model.read_bytes()
    assert store.read(JOB).decode() == run.read_job()
    digest = hashlib.sha256(run.model.read_bytes()).hexdigest()
    assert digest == done.sha256[MODEL]
    assert f"`{digest}`" in store.read(CARD).decode()
    assert done.bytes_written == sum(info.size for info in store.list())


def test_same_export_again_sends_nothing(run: RunFolder):
    """What is there already counts as written."""
    store = MemoryStore()
    first = export(run, store)
    again = export(run, store)
    assert first.sha256 == again.sha256
    assert again.bytes_written == 0


@pytest.mark.parametrize("taken", [MODEL, JOB, CARD])
def test_nothing_is_overwritten_unasked(run: RunFolder, taken: str):
    """Whatever else is there stays, unless a person says otherwise."""
    store = MemoryStore()
    store.put(taken, [b"of somebody else"])
    with pytest.raises(ObjectExists, match="--overwrite"):
        export(run, store)
    assert store.read(taken) == b"of somebody else"
    export(run, store, overwrite=True)
    assert store.read(MODEL) == run.model.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", range(NUM_CHANGES))
@pytest.mark.parametrize("overwrite", [False, True])
def test_cut_short_at_every_change(
    run: RunFolder, tmp_path: Path, *, number: int, after: bool, overwrite: bool
):
    """A card never stands beside another model, and the next attempt completes it."""
    store = MemoryStore()
    if overwrite:
        export(ended_run(tmp_path / "other", value=2.0), store)
    failing = Failing(store, number, after=after)
    try:
        export(run, failing, overwrite=overwrite)
    except StoreUnavailable:
        if CARD in keys(store):
            digest = hashlib.sha256(store.read(MODEL)).hexdigest()
            assert digest in store.read(CARD).decode()
    else:
        assert failing.left >= 0
    export(run, store, overwrite=overwrite)
    assert store.read(MODEL) == run.model.read_bytes()
    assert examine(run.model).sha256 in store.read(CARD).decode()


def test_what_comes_back_is_compared(run: RunFolder):
    """A store that gives back other bytes has not taken the export."""
    store = FaultyStore(MemoryStore(), lambda _, content: content[:-1] + b"?")
    with pytest.raises(StoreError):
        export(run, store)


def test_torn_model_is_not_exported(run: RunFolder):
    """A file that is cut off is found by its header, and nothing is sent."""
    run.model.write_bytes(run.model.read_bytes()[:-1])
    store = MemoryStore()
    with pytest.raises(CorruptObject, match="resume the run"):
        export(run, store)
    assert keys(store) == []


def test_a_signed_export_is_signed_as_a_whole(run: RunFolder):
    """Model, job and card; the card is still written last."""
    store, signer = MemoryStore(), identity.generate(lambda size: bytes(range(size)))
    done = export(run, store, signer=signer)
    found = verify(store, signer.public.key.hex())
    assert found.sha256.keys() == {MODEL, JOB, CARD}
    assert [*done.sha256] == [MODEL, JOB, CARD, SIGNATURE]
    assert export(run, store, signer=signer).bytes_written == 0


def test_nothing_is_signed_beside_other_files(run: RunFolder):
    """Nobody could verify it; nothing is written."""
    store = MemoryStore()
    store.put("model.onnx", [b"of an earlier export"])
    signer = identity.generate(lambda size: bytes(range(size)))
    with pytest.raises(ObjectExists, match=r"'model\.onnx' .*not a part of"):
        export(run, store, signer=signer, overwrite=True)
    assert keys(store) == ["model.onnx"]


def test_a_forgotten_model_is_not_exported(run: RunFolder, tmp_path: Path):
    """A run that ends again has none until the new one is written."""
    run.forget_model()
    run.forget_model()  # There may be none.
    with pytest.raises(RunNotFound, match="no final model"):
        export(run, MemoryStore())
    with pytest.raises(StoreUnavailable, match="cannot write"):
        RunFolder(tmp_path / "nowhere").forget_model()
