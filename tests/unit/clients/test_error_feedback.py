"""What a site keeps of its codec's error, and what it refuses of it."""

from typing import Any

import numpy as np
import pytest

from clients.training.error_feedback import ErrorFeedback, settled
from clients.training.site_state import NOTHING, KeptState, SiteState
from cloud_adapters.storage.memory import MemoryStore
from federation.compression.choice import codec_of
from federation.compression.codec import BeyondCodec, Links, decoded
from federation.errors import CorruptObject
from federation.ids import RunId, SiteId
from federation.messages import RoundTask, TaskKind
from federation.protocols import LocalUpdate
from federation.vectors import Layout, Role, Vector

SIZE = 300
LINKS = Links(up=codec_of("int4"), feedback=1.0)
RUN, SITE = RunId("run"), SiteId("a")


def task(round_index: int, counted: int = 0) -> RoundTask:
    """A task for a model of zeros."""
    return RoundTask(
        run_id=RUN,
        round_index=round_index,
        site=SITE,
        kind=TaskKind.TRAIN,
        layout_digest="0" * 64,
        weights_d=np.zeros(SIZE, np.float32),
        integers_m=np.zeros(0, np.int64),
        evaluate=False,
        evaluate_after=False,
        counted=counted,
    )


def update_of(seed: int) -> Vector:
    """A true update."""
    return np.random.default_rng(seed).standard_normal(SIZE, dtype=np.float32)


def trained(seed: int) -> LocalUpdate:
    """What training gave."""
    return LocalUpdate(
        update_d=update_of(seed),
        integers_m=np.zeros(0, np.int64),
        num_examples=1,
        num_steps=1,
        training=None,
    )


def round_of(kept: KeptState, index: int, counted: int = 0, links: Links = LINKS):
    """Do a round: what was sent, and what is kept."""
    feedback = ErrorFeedback(links, task(index, counted))
    feedback.begin(kept, np.zeros(SIZE, np.float32))
    words = feedback.update(np.zeros(SIZE, np.float32), trained(index))
    arrays, facts = feedback.left()
    return decoded(links.up, words, SIZE, seed=index), KeptState(
        arrays={name: array.copy() for name, array in arrays.items()}, facts=facts
    )


def test_what_was_counted_is_spent_and_what_was_not_comes_back():
    """The next update holds the residual, and the words if they did not count."""
    first_d, kept = round_of(NOTHING, 1)
    np.testing.assert_allclose(
        first_d + kept.arrays["residual"], update_of(1), atol=1e-6
    )
    for counted, missing_d in ((1, update_of(1) - first_d), (0, update_of(1))):
        second_d, after = round_of(kept, 2, counted)
        total_d = second_d + after.arrays["residual"]
        np.testing.assert_allclose(total_d, update_of(2) + missing_d, atol=1e-6)


def test_a_part_of_the_residual_may_be_forgotten():
    """With beta below 1, of what came back, too."""
    links = Links(up=LINKS.up, feedback=0.25)
    _, kept = round_of(NOTHING, 1, links=links)
    second_d, after = round_of(kept, 2, links=links)
    total_d = second_d + after.arrays["residual"]
    np.testing.assert_allclose(total_d, update_of(2) + update_of(1) / 4, atol=1e-6)


def test_later_news_than_the_state_has_are_that_its_words_are_spent():
    """As at a site that has lost its newest state."""
    _, kept = round_of(NOTHING, 1)
    found_d = settled(kept, LINKS, size=SIZE, counted=7)
    assert found_d.tobytes() == kept.arrays["residual"].tobytes()
    assert found_d is not kept.arrays["residual"]


def test_without_feedback_nothing_is_kept():
    """What a codec leaves out is lost."""
    _, kept = round_of(NOTHING, 1, links=Links(up=LINKS.up))
    assert (dict(kept.arrays), dict(kept.facts)) == ({}, {})


def test_a_residual_that_grows_without_end_is_refused():
    """As an update beyond the codec is; nothing is kept of that round."""
    _, kept = round_of(NOTHING, 1)
    arrays = {**kept.arrays, "residual": np.full(SIZE, 3.4e38, np.float32)}
    with pytest.raises(BeyondCodec, match="does not fit into int4"):
        round_of(KeptState(arrays=arrays, facts=kept.facts), 2)


BAD_ARRAYS: list[tuple[dict[str, Any], str]] = [
    (
        {"residual": np.zeros(7, np.float32)},
        "a residual of 7 values, and the model 300",
    ),
    ({"residual": np.zeros(SIZE)}, "a residual of 300 values"),
    ({"residual": np.full(SIZE, np.nan, np.float32)}, "NaN or infinite values"),
    ({"sent": np.zeros(3, np.uint8)}, "3 words of int4 are not the"),
    ({"sent": np.full(156, 255, np.uint8)}, "a scale that is negative or not finite"),
    ({"sent": np.zeros(SIZE, np.float32)}, "without the words of int4 beside it"),
]


@pytest.mark.parametrize(("changes", "text"), BAD_ARRAYS)
def test_a_damaged_residual_is_refused(changes: dict[str, Any], text: str):
    """With what to do, before any work is done."""
    _, kept = round_of(NOTHING, 1)
    bad = KeptState(arrays={**kept.arrays, **changes}, facts=kept.facts)
    with pytest.raises(CorruptObject, match=text) as caught:
        settled(bad, LINKS, size=SIZE, counted=0)
    assert "restore its files" in str(caught.value)


@pytest.mark.parametrize("facts", [{}, {"sent_round": "1"}, {"sent_round": True}])
def test_words_of_no_round_are_refused(facts: dict[str, Any]):
    """It is not known whether they counted."""
    _, kept = round_of(NOTHING, 1)
    with pytest.raises(CorruptObject, match="without the words of int4 beside it"):
        settled(KeptState(arrays=kept.arrays, facts=facts), LINKS, size=SIZE, counted=0)


LAYOUT = Layout.build([("w", (SIZE,), "float32", Role.PARAMETER)])
OTHER = Layout.build([("v", (SIZE,), "float32", Role.PARAMETER)])


@pytest.mark.parametrize(
    ("layout", "codec", "text"),
    [(OTHER, "int4", "another model"), (LAYOUT, "int8", "another codec")],
)
def test_a_residual_of_another_model_or_codec_is_not_used(
    layout: Layout, codec: str, text: str, caplog: pytest.LogCaptureFixture
):
    """The site logs that it starts afresh."""
    store = MemoryStore()
    _, kept = round_of(NOTHING, 1)
    SiteState(SITE, LAYOUT, store, codec="int4").keep(RUN, 1, kept.arrays, kept.facts)
    assert SiteState(SITE, LAYOUT, store, codec="int4").before(RUN, 2).arrays
    assert SiteState(SITE, layout, store, codec=codec).before(RUN, 2) == NOTHING
    assert f"belongs to {text}: it starts afresh" in caplog.text


def test_a_residual_with_a_changed_bit_is_refused():
    """By the digest of its object."""
    store, (_, kept) = MemoryStore(), round_of(NOTHING, 1)
    state = SiteState(SITE, LAYOUT, store, codec="int4")
    state.keep(RUN, 1, kept.arrays, kept.facts)
    (info,) = store.list()
    content = bytearray(store.read(info.key))
    content[-1] ^= 1
    store.put(info.key, [bytes(content)])
    with pytest.raises(CorruptObject, match="not match its digest"):
        state.before(RUN, 2)
