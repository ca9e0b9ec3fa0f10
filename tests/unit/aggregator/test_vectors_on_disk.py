"""The model and the server optimiser's state in files: the same bits, less memory."""

from pathlib import Path

import numpy as np
import pytest
from support.resident import resident_bytes

from aggregator.checkpoint import RunCheckpoints
from aggregator.combine import weighted_mean
from cloud_adapters.storage.disk.scratch import ScratchVectors
from cloud_adapters.storage.memory import MemoryStore
from federation.clock import VirtualClock
from federation.errors import StoreUnavailable
from federation.ids import SiteId
from federation.job.spec import ServerOptimizerSpec
from federation.mapped import give_back
from federation.protocols import RunState, WeightedUpdate
from federation.rounds.server_optimizer import server_optimizer, take_step
from federation.vectors import (
    CHUNK_VALUES,
    Allocate,
    Layout,
    Role,
    in_memory,
    norm,
    place,
)

SIZE = CHUNK_VALUES + 1000
LAYOUT = Layout.build([("weight", (SIZE,), "float32", Role.PARAMETER)])


def checkpoints(store: MemoryStore, allocate: Allocate) -> RunCheckpoints:
    return RunCheckpoints(
        store=store,
        prefix="",
        run_id="run",
        job={},
        layout=LAYOUT,
        keep=2,
        emit=lambda _event: None,
        clock=VirtualClock(),
        chunk_bytes=100_000,
        allocate=allocate,
    )


def two_rounds(name: str, allocate: Allocate) -> tuple[list[str], RunState]:
    """Run two rounds, the second after a restart; return what is stored, and both."""
    store = MemoryStore()
    optimizer = server_optimizer(ServerOptimizerSpec(name=name, lr=0.5))
    moments = {
        key: place(values_d, allocate) for key, values_d in optimizer.init(SIZE).items()
    }
    theta_d = place(np.linspace(-1, 1, SIZE, dtype=np.float32), allocate)
    for index in (1, 2):
        rng = np.random.default_rng(index)
        updates = [
            WeightedUpdate(
                site=SiteId("a"),
                delta_d=rng.standard_normal(SIZE, np.float32),
                weight=weight,
            )
            for weight in (1.0, 2.0)
        ]
        delta_d = weighted_mean(updates, allocate(SIZE))
        assert norm(delta_d) > 1.0
        theta_d = take_step(
            optimizer, LAYOUT, weights_d=theta_d, moments=moments, delta_f=delta_d
        )
        state = RunState(
            round_index=index,
            weights_d=theta_d,
            integers_m=np.zeros(0, np.int64),
            optimizer=moments,
            rounds_completed=index,
            lost_in_a_row=0,
        )
        checkpoints(store, allocate).save(state)
        loaded = checkpoints(store, allocate).load_latest()
        assert loaded is not None
        theta_d, moments = loaded.weights_d, dict(loaded.optimizer)
    return [info.key for info in store.list()], loaded


@pytest.mark.parametrize("name", ["average", "nesterov", "adam"])
def test_rounds_have_the_same_bits(tmp_path: Path, name: str):
    """Also after a restart; checkpoints are named by their content."""
    keys, wanted = two_rounds(name, in_memory)
    found_keys, found = two_rounds(name, ScratchVectors(folder=tmp_path))
    assert found_keys == keys
    assert found.weights_d.tobytes() == wanted.weights_d.tobytes()
    for key, values_d in wanted.optimizer.items():
        assert found.optimizer[key].tobytes() == values_d.tobytes()
    assert [*tmp_path.iterdir()] == []


def test_what_is_given_back_takes_no_memory_and_keeps_its_values(tmp_path: Path):
    found_d = ScratchVectors(folder=tmp_path / "new")(SIZE)
    assert not found_d.any()
    found_d[:] = 7.0
    assert resident_bytes(found_d) >= found_d.nbytes
    give_back(np.frombuffer(memoryview(found_d).cast("B"), np.uint8))
    assert resident_bytes(found_d) == 0
    assert (found_d == 7.0).all()


def test_a_step_leaves_nothing_of_the_vectors_in_memory(tmp_path: Path):
    allocate = ScratchVectors(folder=tmp_path)
    optimizer = server_optimizer(ServerOptimizerSpec(name="nesterov"))
    velocity_d = place(np.ones(SIZE, np.float32), allocate)
    theta_d, delta_d = allocate(SIZE), allocate(SIZE)
    moments = {"velocity": velocity_d}
    take_step(optimizer, LAYOUT, weights_d=theta_d, moments=moments, delta_f=delta_d)
    for vector_d in (velocity_d, theta_d, delta_d):
        assert resident_bytes(vector_d) < vector_d.nbytes / 2


def test_a_disk_without_room_is_an_error_before_a_value_is_written(tmp_path: Path):
    """A map of a file without room would kill the process."""
    with pytest.raises(StoreUnavailable, match="cannot write below"):
        ScratchVectors(folder=tmp_path)(1 << 50)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreUnavailable, match="cannot write below"):
        ScratchVectors(folder=tmp_path / "file")(10)
