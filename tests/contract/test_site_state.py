"""What the state of a site promises, in memory, in files and in encrypted files."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clients.training.site_state import NOTHING, SiteState
from cloud_adapters.keys.key_file import KeyFile, add_key
from cloud_adapters.storage.disk.store import LocalStore
from cloud_adapters.storage.encrypted import EncryptedStore
from cloud_adapters.storage.memory import MemoryStore
from federation.errors import CorruptObject
from federation.ids import RunId, SiteId
from federation.messages import StateName
from federation.protocols import ObjectStore
from federation.vectors import Layout, Role
from privacy.secagg.errors import NoState

SITE = SiteId("a")
LAYOUT = Layout.build(
    [
        ("w", (2,), "float32", Role.PARAMETER),
        ("count", (), "int64", Role.MAX),
        ("mine", (2,), "int64", Role.KEEP),
    ]
)
PLAIN = Layout.build([("w", (2,), "float32", Role.PARAMETER)])
ROUNDS = 3
RUN = RunId("run")


@pytest.fixture(params=["memory", "file", "encrypted"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    files = LocalStore(tmp_path / "store")
    if request.param == "file":
        return files
    add_key(tmp_path / "keys.toml")
    return EncryptedStore(files, KeyFile(tmp_path / "keys.toml"))


def state_in(
    store: ObjectStore,
    layout: Layout = PLAIN,
    site: SiteId = SITE,
    carries: str = "adam",
):
    return SiteState(site, layout, store, rounds=ROUNDS, carries=carries)


@pytest.fixture
def state(store: ObjectStore) -> SiteState:
    return state_in(store)


def keep(state: SiteState, round_index: int) -> None:
    state.keep(RUN, round_index, {"v": np.array([round_index])})


def found(state: SiteState, round_index: int) -> int:
    return int(state.before(RUN, round_index).arrays["v"][0])


def test_what_is_kept_comes_back_bit_by_bit(state: SiteState, store: ObjectStore):
    """Arrays of every type and shape, and facts; also after a restart."""
    arrays = {
        "optimizer/w/exp_avg": np.array([[1e-45, -0.0], [np.pi, np.nan]], np.float32),
        "optimizer/w/step": np.array(7, np.float32),
        "residual": np.array([1 / 3], np.float64),
        "empty": np.empty((0, 3), np.float16),
        "position": np.array([2**62], np.int64),
    }
    facts = {"position": 2**53 + 1, "ratio": 0.1, "name": "\N{GREEK SMALL LETTER PI}"}
    state.keep(RUN, 3, arrays, facts)
    for again in (state, state_in(store)):
        kept = again.before(RUN, 4)
        assert kept.facts == facts
        assert kept.arrays.keys() == arrays.keys()
        for name, array in arrays.items():
            assert kept.arrays[name].dtype == array.dtype  # type: ignore[attr-defined]
            assert kept.arrays[name].shape == array.shape  # type: ignore[attr-defined]
            assert kept.arrays[name].tobytes() == array.tobytes()  # type: ignore[attr-defined]


def test_a_round_that_is_repeated_begins_where_it_began(state: SiteState):
    """What later rounds left is not used, and stays until it is replaced."""
    keep(state, 1)
    keep(state, 2)
    assert found(state, 2) == 1
    assert found(state, 3) == 2
    state.keep(RUN, 1, {"v": np.array([10])})
    assert found(state, 2) == 10
    assert found(state, 3) == 2


def test_the_newest_few_stay(state: SiteState, store: ObjectStore):
    """However long ago they were; rounds after this one are left alone."""
    for round_index in (1, 2, 5, 100):
        keep(state, round_index)
    assert len(list(store.list())) == ROUNDS
    assert (found(state, 5), found(state, 100), found(state, 101)) == (2, 5, 100)
    keep(state, 6)
    assert found(state, 101) == 100


def test_a_copy_beside_it_is_no_state(state: SiteState, store: ObjectStore):
    """As an operator makes one before they try something."""
    keep(state, 1)
    (info,) = store.list()
    store.put(f"{info.key}.bak", [store.read(info.key)])
    assert found(state, 2) == 1
    for round_index in (2, 3, 4):
        keep(state, round_index)
    assert (found(state, 5), len(list(store.list()))) == (4, ROUNDS + 1)


def test_state_of_one_round(state: SiteState):
    """Whatever later rounds have left."""
    for index in range(2, ROUNDS + 3):
        keep(state, index)
    for index in range(3, ROUNDS + 3):
        assert int(state.of(RUN, index).arrays["v"][0]) == index
    assert state.of(RUN, 1) == state.of(RUN, 2) == NOTHING


def test_rounds_sort_as_numbers(state: SiteState):
    """Also where they get a digit more."""
    keep(state, 999_999_999)
    keep(state, 1_000_000_000)
    assert found(state, 1_000_000_001) == 1_000_000_000


def test_sites_and_runs_are_apart(state: SiteState, store: ObjectStore):
    """Sites share a store in a simulation; each run has a store of its own."""
    keep(state, 1)
    assert state_in(store, site=SiteId("b")).before(RUN, 2) == NOTHING
    assert state_in(store, site=SiteId("a.b")).before(RUN, 2) == NOTHING


def test_nothing_is_stored_and_nothing_read_without_need(
    store: ObjectStore, caplog: pytest.LogCaptureFixture
):
    """A job that keeps nothing leaves no trace; an evaluation reads no optimiser."""
    state = SiteState(SITE, PLAIN, store)
    state.keep(RUN, 1, {})
    assert state.before(RUN, 2) == NOTHING
    assert list(store.list()) == []
    keep(state_in(store), 1)
    assert state_in(store).before(RUN, 2, trains=False) == NOTHING
    assert caplog.text == ""


def test_lost_state_is_said_and_the_site_begins_afresh(
    state: SiteState, store: ObjectStore, caplog: pytest.LogCaptureFixture
):
    """Round 1 has none to lose."""
    with caplog.at_level(logging.WARNING):
        assert state.before(RUN, 1) == NOTHING
        assert caplog.text == ""
        keep(state, 1)
        for info in list(store.list()):
            store.delete(info.key)
        assert state.before(RUN, 2) == NOTHING
    assert "a has no state" in caplog.text
    assert "before round 2" in caplog.text
    assert "starts afresh" in caplog.text


def _changed(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def _other_fact(content: bytes) -> bytes:
    return content.replace(b'"epoch": 1', b'"epoch": 2')


def _torn(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _newer(content: bytes) -> bytes:
    line, _, rest = content.partition(b"\n")
    return json.dumps({**json.loads(line), "version": 3}).encode() + b"\n" + rest


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (_changed, "does not match its digest"),
        (_other_fact, "does not match its digest"),
        (_torn, "does not match its digest|is damaged or incomplete"),
        (_newer, "version 3, but this release reads 2|does not match its digest"),
        (lambda _: b"", "is damaged or incomplete"),
        (lambda _: b"garbage", "is damaged or incomplete"),
        (lambda _: b"{}\n\n", "is damaged or incomplete"),
    ],
)
def test_damaged_state_is_refused(
    state: SiteState, store: ObjectStore, spoil: Callable[[bytes], bytes], fault: str
):
    """The message says what to do."""
    state.keep(RUN, 1, {"v": np.arange(9.0)}, {"epoch": 1})
    (info,) = store.list()
    store.put(info.key, [spoil(store.read(info.key))])
    with pytest.raises(
        CorruptObject, match=rf"{fault}.*[Dd]elete every sites/a/state-"
    ):
        state.before(RUN, 2)


def test_state_of_another_round_or_site_is_refused(
    state: SiteState, store: ObjectStore
):
    """Under the right name; nothing of it is used."""
    keep(state, 1)
    (info,) = store.list()
    content = store.read(info.key)
    store.put(info.key.replace("1", "2"), [content])
    with pytest.raises(CorruptObject, match="another site or round"):
        state.before(RUN, 3)
    store.put(info.key.replace("/a/", "/b/"), [content])
    with pytest.raises(CorruptObject, match="another site or round"):
        state_in(store, site=SiteId("b")).before(RUN, 2)


@pytest.mark.parametrize(
    ("of", "other"),
    [
        (("again", PLAIN, "adam"), "run"),
        (("run", LAYOUT, "adam"), "model"),
        (("run", PLAIN, "sgd"), "optimizer"),
        (("again", LAYOUT, "sgd"), "run and model and optimizer"),
    ],
)
def test_state_of_another_run_model_or_optimiser_is_not_used(
    store: ObjectStore,
    caplog: pytest.LogCaptureFixture,
    of: tuple[str, Layout, str],
    other: str,
):
    """The site says which file and begins afresh; what it keeps then is used."""
    run, layout, optimizer = of
    keep(state_in(store), 1)
    state = state_in(store, layout, carries=optimizer)
    with caplog.at_level(logging.WARNING):
        assert state.before(RunId(run), 2) == NOTHING
    file = "sites/a/state-0000000001"
    assert f"{file}, which belongs to another {other}" in caplog.text
    assert "starts afresh" in caplog.text
    state.keep(RunId(run), 2, {"v": np.array([2])})
    assert state.before(RunId(run), 3).arrays["v"] == 2


def integers(*values: int):
    array = np.array(values, np.int64)
    array.flags.writeable = False
    return array


def test_a_site_gets_its_own_integers_back(store: ObjectStore):
    """Values of role ``keep`` replace the server's; the others are the server's."""
    state = state_in(store, LAYOUT)
    first = state.before(RUN, 1)
    assert state.restore_integers(integers(1, 2, 3), first).tolist() == [1, 2, 3]
    state.keep(RUN, 1, state.own_integers(integers(7, 8, 9)))
    kept = state.before(RUN, 2, trains=False)
    assert state.restore_integers(integers(1, 0, 0), kept).tolist() == [1, 8, 9]


def test_integers_of_a_site_are_concealed(store: ObjectStore):
    """What travels holds zeros in their place."""
    assert state_in(store, LAYOUT).conceal(integers(5, 6, 7)).tolist() == [5, 0, 0]


def test_without_integers_of_its_own_a_model_passes(store: ObjectStore):
    """Straight through."""
    state, values = state_in(store), integers()
    assert state.own_integers(values) == {}
    assert state.restore_integers(values, NOTHING) is state.conceal(values) is values


def test_a_state_is_named_by_its_round_and_its_context(state: SiteState):
    """Whoever lacks it says so, and begins with no other."""
    context = "ab" * 32
    state.keep(RUN, 2, {"v": np.array([2])}, context=context)
    keep(state, 3)
    assert int(state.named(RUN, StateName(2, context)).arrays["v"][0]) == 2
    assert state.named(RUN, None) == NOTHING
    for name in (StateName(2, "cd" * 32), StateName(1, context), StateName(3, "")):
        with pytest.raises(NoState, match=f"state of round {name.round_index}"):
            state.named(RUN, name)
    with pytest.raises(NoState):
        state.named(RunId("another"), StateName(2, context))


def test_the_state_that_a_round_began_with_stays(state: SiteState):
    for index in range(1, ROUNDS + 4):
        state.keep(RUN, index, {"v": np.array([index])}, before=1)
    kept = [i for i in range(1, ROUNDS + 4) if state.of(RUN, i) != NOTHING]
    assert kept == [1, *range(4, ROUNDS + 4)]


def test_arrays_of_an_unlisted_method_are_refused(store: ObjectStore):
    """Then nothing that decides what a site computes is left out of mask keys."""
    with pytest.raises(ValueError, match="kept_state"):
        keep(SiteState(SITE, PLAIN, store), 1)
