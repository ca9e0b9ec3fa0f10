"""Who is there, and who they are: nodes that answer a handshake, late or wrongly."""

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cloud_adapters.flower import simulation as flower_simulation
from cloud_adapters.flower.facts import Connected
from cloud_adapters.transport.redelivery import Word
from federation.clock import VirtualClock
from federation.errors import ProtocolError, SiteError, SiteNotReady
from federation.ids import SiteId

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import Error, Message, RecordDict  # noqa: E402
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower import (  # noqa: E402
    handshake as flower_handshake,
    site as flower_site,
)

pytestmark = pytest.mark.flower

SITES = [SiteId("one"), SiteId("two")]


class SpokenCall:
    """Believes whoever says a name, but not the liar.

    Attributes:
        question: What is asked.
        more: What is asked after it.
        spares: Whether it does without who is shy.
        absent: Whom it does without.
    """

    def __init__(self, *more: bytes, spares: bool = False) -> None:
        self.question, self.more, self.spares = b"who are you?", [*more], spares
        self.absent: dict[SiteId, str] = {}

    def move_on(self) -> bool:
        if not self.more:
            return False
        self.question = self.more.pop(0)
        return True

    def site_of(self, answer: bytes) -> SiteId:
        name = answer.decode()
        if name == "liar":
            raise ProtocolError("the signature of site 'one' is wrong")
        if name == "busy":
            raise SiteNotReady("site 'one' does not take part: its disk is full")
        if name == "shy" and self.spares:
            self.absent[SiteId("one")] = "site 'one' does not take part: rounds"
            return SiteId("one")
        if name == "shy":
            text = "site 'one' does not take part: rounds: too many"
            self.absent[SiteId("one")] = text
            raise SiteError(text)
        return SiteId(name)


class Nodes:
    """A Flower whose nodes say what they are told to say.

    Attributes:
        say: Node by its answer: text, an error, or None for silence; or these by
            question.
        asked: Nodes that were asked, in order.
        heard: Questions that they were asked.
        full: Nodes that messages do not reach.
    """

    def __init__(self, **say: Any) -> None:
        self.say = {int(name[1:]): answer for name, answer in say.items()}
        self.asked: list[int] = []
        self.heard: list[bytes] = []
        self.full: set[int] = set()
        self._open: dict[str, Message] = {}
        self._names = itertools.count()

    def get_node_ids(self) -> list[int]:
        return list(self.say)

    def push_messages(self, messages: list[Message]) -> Iterator[str]:
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.full:
                continue
            if message.metadata.message_type != flower_site.PROBE:
                self.asked.append(node)
                self.heard.append(flower_site.unpack_bytes(message.content))
            name = f"m{next(self._names)}"
            message.metadata.__dict__["_message_id"] = name
            self._open[name] = message
            yield name

    def pull_messages(self, ids: list[str]) -> list[Message]:
        found = []
        for name in ids:
            message = self._open[name]
            answer = self.say.get(message.metadata.dst_node_id)
            is_probe = message.metadata.message_type == flower_site.PROBE
            if isinstance(answer, dict) and is_probe:
                answer = answer.get(flower_site.PROBE)
            if isinstance(answer, dict):
                answer = answer.get(flower_site.unpack_bytes(message.content))
            if answer is None:
                continue
            if isinstance(answer, str):
                answer = flower_site.pack_bytes(answer.encode())
            found.append(Message(answer, reply_to=self._open.pop(name)))
        return found


@pytest.fixture(autouse=True)
def _in_a_run() -> None:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1


def test_what_needs_no_answer_waits_for_nobody_long():
    """Who is connected hears it; who has not fetched it by then never does."""
    clock, nodes = VirtualClock(), Nodes(n1="", n2="")
    flower_handshake.tell(nodes, [1, 2, 3], b"the end", clock=clock)  # type: ignore[arg-type]
    assert (nodes.asked, nodes.heard) == ([1, 2], 2 * [b"the end"])
    assert clock.monotonic() < flower_handshake.TELL_SECONDS
    flower_handshake.tell(Nodes(n1=None), [1], b"the end", clock=clock)  # type: ignore[arg-type]
    assert clock.monotonic() >= flower_handshake.TELL_SECONDS


def meet(
    nodes: Nodes,
    *more: bytes,
    meanwhile: Callable[[float], None] = lambda _: None,
    call: SpokenCall | None = None,
    **changes: Any,
) -> tuple[dict[SiteId, int], float]:
    """Call the roll for at most a minute; who is there, and how long it took."""
    clock = VirtualClock()

    def pause() -> None:
        clock.sleep(1.0)
        meanwhile(clock.monotonic())

    call = call or SpokenCall(*more)
    attendance = flower_handshake.Attendance(handshake=call, **changes)
    found, _ = attendance.find_nodes(nodes, SITES, clock=clock, pause=pause)
    return found, clock.monotonic()


def test_sites_are_known_by_their_answers():
    """Not by the numbers of their nodes, nor by the order of these."""
    assert meet(Nodes(n5="two", n9="one")) == ({"one": 9, "two": 5}, 0.0)


def test_each_node_is_asked_once():
    """However long another one takes."""
    nodes = Nodes(n5="one", n9=None)

    def meanwhile(now: float) -> None:
        nodes.say[9] = "two" if now > 10 else None

    found, seconds = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}
    assert sorted(nodes.asked) == [5, 9]
    assert 10 < seconds < 13


def test_node_that_comes_later_is_asked_when_it_is_there():
    """A run may be begun before its sites are up."""
    nodes = Nodes(n5="one")

    def meanwhile(now: float) -> None:
        if now > 20:
            nodes.say[9] = "two"

    found, seconds = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}
    assert 20 < seconds < 23


def test_known_nodes_are_not_asked():
    """One is a site of the run, one of another run; neither could answer."""
    nodes = Nodes(n5="liar", n7="liar", n9="one")
    known = {SiteId("two"): 5, SiteId("other"): 7}
    assert meet(nodes, known=known) == ({"one": 9, "two": 5}, 0.0)
    assert nodes.asked == [9]


def test_known_node_is_waited_for():
    """It is there when it is connected."""
    nodes = Nodes(n9="one")

    def meanwhile(now: float) -> None:
        if now > 20:
            nodes.say[5] = None

    found, seconds = meet(nodes, meanwhile=meanwhile, known={SiteId("two"): 5})
    assert found == {"one": 9, "two": 5}
    assert 20 < seconds < 23


def test_enough_sites_may_begin_without_the_others():
    """But only once the time is over."""
    assert meet(Nodes(n5="one", n9=None), required=1) == ({"one": 5}, 60.0)


def test_whoever_waits_is_told_who_is_there_and_for_how_long():
    """At first, and whenever that or who is connected changes."""
    nodes, told = Nodes(n5="one"), list[Connected]()

    def meanwhile(now: float) -> None:
        if now == 10:
            nodes.say[9] = None
        elif now == 20:
            nodes.say[9] = "two"

    enrolled = {SiteId("one"): 5, SiteId("two"): 9}
    meet(nodes, meanwhile=meanwhile, tell=told.append, enrolled=enrolled)
    one, two = ("one",), ("two",)
    assert told == [
        Connected(there=one, missing=two, absent=two, seconds=60.0),
        Connected(there=one, missing=two, seconds=50.0),
        Connected(there=(*one, *two), missing=(), seconds=40.0),
    ]
    assert [told[index].lack("two") for index in (0, 1)] == [
        "two (not connected)",
        "two (has not answered yet)",
    ]


def test_too_few_sites_do_not_begin():
    """The message names those that are missing, and those that are not connected."""
    with pytest.raises(SiteError, match="cannot start: two has not answered"):
        meet(Nodes(n5="one", n9=None))
    enrolled = {SiteId("one"): 5, SiteId("two"): 9}
    text = r"start:\n  one has not answered\n  two is not connected: start its agent"
    with pytest.raises(SiteError, match=text):
        meet(Nodes(n5=None), enrolled=enrolled)
    with pytest.raises(SiteError, match=r"one, two are not connected: start their"):
        meet(Nodes(), enrolled=enrolled)


def test_other_sites_nodes_are_left_in_peace():
    """The federation may be larger than the run."""
    found, _ = meet(Nodes(n1="three", n5="one", n9="two"))
    assert found == {"one": 5, "two": 9}


def test_node_that_goes_may_come_back():
    """Flower says so of a node that restarts; it is asked again."""
    nodes = Nodes(n5="one", n9=Error(5, "gone"))

    def meanwhile(now: float) -> None:
        if now > 10:
            nodes.say[9] = "two"

    found, _ = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}


def test_node_that_cannot_be_reached_is_tried_again():
    """Flower may not take a message immediately."""
    nodes = Nodes(n5="one", n9="two")
    nodes.full = {9}

    def meanwhile(now: float) -> None:
        if now > 10:
            nodes.full = set()

    found, _ = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}


def test_refusal_is_told_at_once():
    """Nobody waits for a minute to hear it, and a site that is not there is named."""
    with pytest.raises(SiteError, match="cannot start:") as caught:
        meet(Nodes(n9="shy"), meanwhile=_never)
    _, *lines = str(caught.value).splitlines()
    assert lines == [
        "  site 'one' does not take part: rounds: too many",
        "  two has not answered",
    ]


@pytest.mark.parametrize(("seconds", "names_two"), [(5, False), (50, True)])
def test_a_refusal_waits_a_little_for_the_other_sites(seconds: int, *, names_two: bool):
    """So that all operators learn at once what their sites lack."""
    nodes, seen = Nodes(n9="shy", n5=None), list[float]()

    def meanwhile(now: float) -> None:
        seen.append(now)
        if now > seconds:
            nodes.say[5] = "two"

    with pytest.raises(SiteError, match="too many") as caught:
        meet(nodes, meanwhile=meanwhile)
    assert ("two has not answered" in str(caught.value)) == names_two
    assert seen[-1] < 20


def test_site_that_is_not_ready_is_asked_again():
    """Not at each look: it loads its data every time."""
    nodes = Nodes(n5="two", n9="busy")

    def meanwhile(now: float) -> None:
        if now > 25:
            nodes.say[9] = "one"

    found, seconds = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 9, "two": 5}
    assert 25 < seconds <= 31
    assert 5 <= nodes.asked.count(9) <= 7


def test_site_that_stays_unready_ends_the_wait_with_its_reason():
    """And a run that can do without it begins."""
    with pytest.raises(SiteError, match=r"start:\n  site 'one' .*: its disk is full"):
        meet(Nodes(n5="two", n9="busy"))
    assert meet(Nodes(n5="two", n9="busy"), required=1) == ({"two": 5}, 60.0)


def test_site_that_is_done_without_is_not_waited_for():
    """Whether that was known before, or is told by its answer."""
    call = SpokenCall(spares=True)
    found = meet(Nodes(n5="two", n9="shy"), call=call, required=1, meanwhile=_never)
    assert found == ({"two": 5}, 0.0)
    known = meet(Nodes(n5="two", n9="one"), call=call, required=1, meanwhile=_never)
    assert known == ({"two": 5}, 0.0)


def test_run_that_cannot_do_without_a_site_ends_at_once():
    """With the site's reason; nobody waits for the others."""
    call = SpokenCall(spares=True)
    with pytest.raises(SiteError, match=r"start:\n  site 'one' does not .*: rounds\n"):
        meet(Nodes(n9="shy"), call=call, required=2, meanwhile=_never)


def _never(now: float) -> None:
    raise AssertionError(f"waited until {now}")


UNBELIEVABLE = [
    ("liar", "the signature of site 'one' is wrong"),
    (Error(2, "KeyError"), "cannot answer: KeyError"),
    (RecordDict(), "without a frame"),
]


@pytest.mark.parametrize(("answer", "text"), UNBELIEVABLE)
def test_unbelievable_answer_does_not_stop_a_run_of_others(answer: Any, text: str):
    """Whose node it is nobody knows; those that are missing may still come."""
    nodes = Nodes(n5="one", n7=answer)

    def meanwhile(now: float) -> None:
        if now > 10:
            nodes.say[9] = "two"

    found, _ = meet(nodes, meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}


@pytest.mark.parametrize(("answer", "text"), UNBELIEVABLE)
def test_unbelievable_answer_is_told_when_a_site_is_missing(answer: Any, text: str):
    """It may be that very site; and nobody waits for long."""
    seen: list[float] = []
    expected = f"two has not answered\n  Flower node 7: .*{text}"
    with pytest.raises(SiteError, match=expected):
        meet(Nodes(n5="one", n7=answer), meanwhile=seen.append)
    assert flower_handshake.DOUBT_SECONDS < max(seen) < 20


def test_two_nodes_for_one_site_are_refused():
    """One of them is a copy of the other's folder."""
    with pytest.raises(SiteError, match="claim to be site 'one'"):
        meet(Nodes(n5="one", n9="one"))


def test_second_question_is_for_those_who_answered_the_first():
    """And for nobody before all of them have."""
    nodes = Nodes(n1="three", n5="one", n9=None)

    def meanwhile(now: float) -> None:
        nodes.say[9] = "two" if now > 10 else None

    found, _ = meet(nodes, b"and now?", meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}
    assert nodes.heard == [b"who are you?"] * 3 + [b"and now?"] * 2
    assert sorted(nodes.asked[3:]) == [5, 9]


def test_nobody_may_be_missing_from_the_second_answer():
    """Even where the run may begin without some."""
    nodes = Nodes(n5="one", n9={b"who are you?": "two"})
    with pytest.raises(SiteError, match="has not answered"):
        meet(nodes, b"and now?", required=1)


def test_second_question_has_a_time_of_its_own():
    """A site that came in the last second must still be able to answer it."""
    nodes = Nodes(n5="one", n9=None)

    def meanwhile(now: float) -> None:
        if now > 58:
            nodes.say[9] = {b"who are you?": "two"}
        if now > 90:
            nodes.say[9] = "two"

    found, seconds = meet(nodes, b"and now?", meanwhile=meanwhile)
    assert found == {"one": 5, "two": 9}
    assert 90 < seconds < 93


def test_run_with_enough_sites_goes_on_soon_and_takes_the_others_in_later():
    """One that says that it works on its answer is waited for."""
    enrolled = {SiteId("one"): 5, SiteId("two"): 9}
    at: dict[str, Any] = {"required": 1, "spare_seconds": 20.0, "enrolled": enrolled}
    assert meet(Nodes(n5="one", n9=None), **at) == ({"one": 5}, 20.0)
    known = flower_site.pack_word(Word.KNOWN)
    works = Nodes(n5="one", n9={flower_site.PROBE: known})
    assert meet(works, **at) == ({"one": 5}, 60.0)
    nodes, clock, told = Nodes(n5="one", n9=None), VirtualClock(), list[Connected]()
    attendance = flower_handshake.Attendance(
        handshake=SpokenCall(), tell=told.append, **at
    )
    found, look = attendance.find_nodes(
        nodes, SITES, clock=clock, pause=lambda: clock.sleep(1.0)
    )
    look()
    assert (found, clock.monotonic()) == ({"one": 5}, 20.0)
    nodes.say[9] = "two"
    look()
    assert found == {"one": 5}, "not at each look"
    clock.sleep(1.0)
    look()
    assert found == {"one": 5, "two": 9}
    assert (told[-1].there, told[-1].missing) == (("one", "two"), ())
