"""Records grouped by person, and the choice among a person's records."""

import numpy as np
import pytest

from privacy.dp.persons import Persons
from privacy.keystream import Keystream, uniform_words

IDS = np.array(["ann", "bob", "ann", "cy", "bob", "ann"])


def words_of(seed: int):
    """Words that a test can draw again."""
    stream = Keystream(seed.to_bytes(32, "big"))
    return lambda count: uniform_words(stream, count)


def no_words(count: int):
    raise AssertionError(f"{count} words were drawn")


def test_all_records_of_chosen_persons_are_drawn():
    """Side by side, in the order of the persons, without any randomness."""
    persons = Persons.of(IDS)
    assert persons.count == 3
    drawn = persons.draw(np.array([0, 2]), most=3, draw_words=no_words)
    assert drawn.records.tolist() == [0, 2, 5, 3]
    assert drawn.sizes is not None
    assert drawn.sizes.tolist() == [3, 1]


@pytest.mark.parametrize("ids", [np.array([7, 7, -1]), np.array([b"x", b"x", b"y"])])
def test_persons_are_named_by_integers_or_texts(ids: np.ndarray):
    """Equal names are one person, whatever their order and type."""
    persons = Persons.of(ids)
    drawn = persons.draw(np.arange(2), most=9, draw_words=no_words)
    assert persons.count == 2
    assert sorted(drawn.records.tolist()) == [0, 1, 2]


def test_at_most_so_many_records_of_a_person_are_drawn():
    """Each of them the person's own, none twice, and others than the last time."""
    persons, draw_words = Persons.of(np.repeat([1, 2, 3], [20, 2, 5])), words_of(1)
    seen = set()
    for _ in range(20):
        drawn = persons.draw(np.array([0, 1, 2]), most=4, draw_words=draw_words)
        assert drawn.sizes is not None
        assert drawn.sizes.tolist() == [4, 2, 4]
        first, second, third = np.split(drawn.records, [4, 6])
        assert len(set(first.tolist())) == 4
        assert first.max() < 20
        assert second.tolist() == [20, 21]
        assert third.min() >= 22
        seen |= set(first.tolist())
    assert seen == set(range(20))  # Each is left out of 20 draws with 0.8^20 = 1 %.


def test_every_record_of_a_person_is_drawn_equally_often():
    """2,000 draws of 2 of 5: 800 for each, and 110 are five deviations."""
    persons, draw_words = Persons.of(np.zeros(5, np.int64)), words_of(2)
    counts = np.zeros(5)
    for _ in range(2000):
        drawn = persons.draw(np.array([0]), most=2, draw_words=draw_words)
        counts[drawn.records] += 1
    assert np.abs(counts - 800).max() < 110
