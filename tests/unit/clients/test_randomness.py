"""Streams, and the global generators of torch."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from clients.randomness import GlobalDraws, seeded_globally, stream, torch_seed

CPU = torch.device("cpu")
PERMUTATION = [1, 6, 5, 7, 0, 2, 3, 4]
SEED = 2_514_814_007_368_379_262


@pytest.fixture(autouse=True)
def state_stays():
    """Nothing here may touch what the caller draws next."""
    before = torch.get_rng_state()
    yield
    assert torch.equal(before, torch.get_rng_state())


def test_streams_are_the_same_everywhere():
    """Values that were drawn once must come again on every machine."""
    assert stream(7, "epoch", "site", 3).permutation(8).tolist() == PERMUTATION
    assert torch_seed(7, "training", "site", 3) == SEED


def test_a_seeded_block_draws_by_its_seed():
    """What was drawn before does not matter."""

    def draw(seed: int) -> list[float]:
        with seeded_globally(seed, CPU):
            return torch.rand(3).tolist()

    assert draw(1) == draw(1) != draw(2)


def test_a_failing_block_puts_the_generator_back():
    """The fixture looks at the state."""

    def draw_and_fail() -> None:
        with seeded_globally(1, CPU):
            torch.rand(3)
            raise KeyError

    with pytest.raises(KeyError):
        draw_and_fail()


def run_all(works: list[Callable[[], object]], threads: int):
    """Run works of one kind in threads; each has its index as seed."""
    draws = GlobalDraws(CPU)
    with ThreadPoolExecutor(threads) as executor:
        futures = [
            executor.submit(draws.run, work, kind="train", seed=seed)
            for seed, work in enumerate(works)
        ]
        return [future.result(timeout=20) for future in futures]


def some_draws():
    """Draw many times, so that threads would come in between."""
    return [float(torch.rand(())) for _ in range(200)]


@pytest.mark.parametrize("threads", [2, 4])
def test_draws_do_not_depend_on_threads(threads: int):
    """Work that draws gives the same with one thread and with several."""
    expected = run_all([some_draws] * 8, 1)
    assert len({tuple(drawn) for drawn in expected}) == 8
    assert expected == run_all([some_draws] * 8, threads)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_late_draws_are_noticed(threads: int):
    """Work that draws although the first did not is as reproducible."""
    works = [list] * 3 + [some_draws] * 5
    expected = [[], [], []]
    for seed in range(3, 8):
        with seeded_globally(seed, CPU):
            expected.append(some_draws())
    assert expected == run_all(works, threads)


def test_work_that_does_not_draw_runs_together():
    """Two threads meet inside it, once it is known."""
    draws = GlobalDraws(CPU)
    draws.run(list, kind="train", seed=0)
    meeting = threading.Barrier(2)
    with ThreadPoolExecutor(2) as executor:
        futures = [
            executor.submit(
                draws.run, lambda: meeting.wait(timeout=10), kind="train", seed=0
            )
            for _ in range(2)
        ]
        assert {0, 1} == {future.result() for future in futures}


def test_failing_work_lets_the_next_one_in():
    """An error passes through, alone as well as together."""

    def fail() -> None:
        raise KeyError

    draws = GlobalDraws(CPU)
    for work in (fail, list, fail, some_draws, fail):
        if work is fail:
            with pytest.raises(KeyError):
                draws.run(work, kind="train", seed=0)
        else:
            draws.run(work, kind="train", seed=0)
