"""When a question is asked after or sent again, and what a site knows of questions."""

import pytest

from cloud_adapters.transport import redelivery
from cloud_adapters.transport.redelivery import (
    Inbox,
    Inquiry,
    Word,
    is_given_up,
    new_name,
)


def test_what_is_known_to_be_lost_is_asked_after_soon():
    """And never later than otherwise."""
    inquiry = Inquiry(0.0)
    inquiry.note_lost(1.0)
    assert not inquiry.is_due(1.5)
    assert inquiry.is_due(2.0)
    inquiry = Inquiry(0.0)
    inquiry.note_lost(4.9)
    assert inquiry.is_due(5.0)


def test_unknown_question_is_sent_again_once():
    """A word of before it was sent again says nothing of now."""
    inquiry = Inquiry(0.0)
    assert inquiry.is_missing(Word.UNKNOWN, asked=5.0)
    inquiry.note_sent(6.0)
    assert not inquiry.is_missing(Word.UNKNOWN, asked=5.0)
    assert inquiry.is_missing(Word.UNKNOWN, asked=15.0)


@pytest.mark.parametrize("word", [Word.KNOWN, Word.ANSWERED])
def test_known_question_is_not_sent_again(word: Word):
    """The site works on it, or has answered it."""
    assert not Inquiry(0.0).is_missing(word, asked=5.0)


def test_site_that_lies_is_sent_a_model_now_and_then():
    """And not as fast as it can say that it has none."""
    inquiry, sent = Inquiry(0.0), 0
    for tenth in range(6000):
        now = tenth / 10
        if inquiry.is_due(now) and inquiry.is_missing(Word.UNKNOWN, asked=now):
            inquiry.note_sent(now)
            sent += 1
    assert sent <= 600 / redelivery.MOST_SECONDS + 1


def test_questions_that_were_sent_together_are_probed_one_by_one():
    """Of many, none much later than the first."""
    inquiries = [Inquiry(0.0, index) for index in range(1000)]
    num_due = [sum(each.is_due(now) for each in inquiries) for now in range(11)]
    assert num_due[:5] == [0] * 5
    assert max(num_due) < len(inquiries) / 4
    assert sum(num_due) == len(inquiries)


@pytest.mark.parametrize(
    ("older", "newer", "expected"),
    [
        ((3, 3), (5, 5), True),
        ((3, 3), (5, 3), False),  # Two rounds are open.
        ((5, 5), (5, 5), False),  # Two steps of one round.
        ((0, 0), (5, 5), False),  # A handshake, or the end of a run.
    ],
)
def test_name_says_which_questions_were_given_up(
    older: tuple[int, int], newer: tuple[int, int], *, expected: bool
):
    assert is_given_up(new_name(*older), new_name(*newer)) is expected
    # Neither a stranger nor an aggregator that says no more gives up anything.
    assert not is_given_up("a stranger's", new_name(*newer))
    assert not is_given_up(new_name(*older), "5-abcd")


def test_question_is_admitted_once():
    """However often it comes, and whatever has become of it."""
    inbox: Inbox[bytes] = Inbox()
    assert inbox.look("a") is Word.UNKNOWN
    assert inbox.admit("a")
    assert not inbox.admit("a")
    assert inbox.look("a") is Word.KNOWN
    inbox.keep("a", b"answer")
    assert not inbox.admit("a")
    assert inbox.look("a") is Word.ANSWERED
    assert inbox.answer("a") == b"answer"


def test_one_answer_is_kept():
    """Until the next question comes; the name of the question before stays."""
    inbox: Inbox[bytes] = Inbox()
    inbox.admit("a")
    inbox.keep("a", b"answer")
    inbox.admit("b")
    assert inbox.look("a") is Word.KNOWN
    assert inbox.answer("a") is None
    assert not inbox.admit("a")


def test_question_that_came_in_part_is_unknown():
    """It is sent again, and then it is worked on."""
    inbox: Inbox[bytes] = Inbox()
    inbox.admit("a")
    inbox.forget("a")
    assert inbox.look("a") is Word.UNKNOWN
    assert inbox.admit("a")


def test_an_answer_of_each_run_is_kept():
    """A question of one run says nothing of whether the other's answer arrived."""
    inbox: Inbox[bytes] = Inbox(max_runs=2)
    for run, name in ((1, "a"), (2, "b")):
        inbox.admit(name, run)
        inbox.keep(name, name.encode(), run)
    assert [inbox.answer(name) for name in "ab"] == [b"a", b"b"]
    inbox.admit("c", 2)
    assert [inbox.look(name) for name in "abc"] == [
        Word.ANSWERED,
        Word.KNOWN,
        Word.KNOWN,
    ]
    inbox.keep("c", b"c", 2)
    inbox.admit("d", 3)  # There are only so many: the oldest is dropped.
    assert inbox.answer("a") is None
    assert inbox.answer("c") == b"c"
