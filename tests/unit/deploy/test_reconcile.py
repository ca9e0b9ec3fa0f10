"""What has to happen so that the nodes that run become those that are wanted."""

import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from cloud_adapters.compute.pool import Node, NodeState
from deploy.fleet import reconcile
from deploy.fleet.reconcile import Decision, NodeRole, check_owner, decide, labels
from federation.errors import ComputeError

ROLE = NodeRole(name="site-a", settings="s1")


def node(
    number: int, state: NodeState, *, role: NodeRole = ROLE, owner: str = "o"
) -> Node:
    return Node(
        id=f"{role.name}-{number}",
        name=role.name,
        state=state,
        labels=labels("fed", owner, role, number),
        launched=float(number),
    )


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.sampled_from(NodeState)),
        max_size=6,
    )
)
def test_of_two_folders_one_keeps_the_name(found: list[tuple[str, int, NodeState]]):
    """Whatever both see: never none, and never both if both have a node."""
    nodes = [
        replace(node(at, state, owner=owner), launched=float(launched))
        for at, (owner, launched, state) in enumerate(found)
    ]
    alive = {n.labels["crossfed-owner"] for n in nodes if n.state is not NodeState.GONE}
    stay = set()
    for owner in alive:
        with contextlib.suppress(ComputeError):
            reconcile.check_first(nodes, owner, "fed")
            stay.add(owner)
    assert len(stay) == min(1, len(alive))


def test_who_was_first_is_named():
    """By the node, which may be looked at."""
    nodes = [node(2, NodeState.RUNNING), node(1, NodeState.STARTING, owner="other")]
    with pytest.raises(ComputeError, match=r"was first: site-a \(site-a-1\)"):
        reconcile.check_first(nodes, "o", "fed")
    reconcile.check_first(nodes, "other", "fed")


def test_a_launch_whose_outcome_nobody_knows_is_repeated():
    """With its own number, of which the service launches one node at most."""
    assert decide(ROLE, [], 3).number == 3
    gone = [node(2, NodeState.GONE)]
    assert decide(ROLE, gone, 3).number == 3


def test_a_node_that_is_gone_is_replaced_with_the_next_number():
    assert decide(ROLE, [node(3, NodeState.GONE)], 3).number == 4
    assert decide(ROLE, [node(3, NodeState.STOPPING)], 3).number == 4


def test_numbers_that_were_written_down_may_be_lost():
    """Labels have them, too: a lost file launches no second node of a number."""
    assert decide(ROLE, [node(3, NodeState.GONE)], 0).number == 4
    assert decide(ROLE, [node(3, NodeState.RUNNING)], 0).node is not None


def test_a_node_with_other_settings_is_replaced():
    other = node(1, NodeState.RUNNING, role=replace(ROLE, settings="s0"))
    found = decide(ROLE, [other], 1)
    assert found == Decision(role=ROLE, node=None, number=2, end=(other,))


def test_nodes_of_other_roles_are_left_alone():
    other = node(5, NodeState.RUNNING, role=replace(ROLE, name="site-b"))
    assert decide(ROLE, [other], 0) == Decision(role=ROLE, node=None, number=1)


def test_nodes_of_another_owner_are_refused_unless_they_are_gone():
    check_owner([node(1, NodeState.RUNNING)], "o", "fed")
    check_owner([node(1, NodeState.GONE, owner="x")], "o", "fed")
    with pytest.raises(ComputeError, match=r"site-a \(site-a-1\).*--any-owner"):
        check_owner([node(1, NodeState.RUNNING, owner="x")], "o", "fed")


@given(st.lists(st.sampled_from(["noted", "asked", "launched", "vanish", ""])))
def test_whatever_is_killed_one_node_is_left_in_the_end(story: list[str]):
    """A command may die before, in or after its launch; a node may vanish."""
    nodes: dict[int, Node] = {}
    written = 0
    for event in [*story, ""]:
        if event == "vanish":
            nodes = {n: replace(one, state=NodeState.GONE) for n, one in nodes.items()}
            continue
        decision = decide(ROLE, list(nodes.values()), written)
        if decision.node is None:
            assert decision.number >= max([written, *nodes])
            if event == "noted":
                written = decision.number
                continue
            written = decision.number
            if event == "asked":  # The request was lost.
                continue
            if decision.number not in nodes:
                nodes[decision.number] = node(decision.number, NodeState.RUNNING)
    alive = [one for one in nodes.values() if one.state is NodeState.RUNNING]
    assert len(alive) == 1
    assert alive[0].labels[reconcile.NUMBER] == str(max(nodes))
