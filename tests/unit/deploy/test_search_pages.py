"""A search draws its page now and then."""

from deploy.tuning import search
from federation.clock import VirtualClock


def test_page_is_due_at_first_and_after_a_while():
    clock = VirtualClock()
    is_due = search._every(10.0, clock)
    assert is_due()
    clock.sleep(9.9)
    assert not is_due()
    clock.sleep(0.1)
    assert is_due()
    assert not is_due()
