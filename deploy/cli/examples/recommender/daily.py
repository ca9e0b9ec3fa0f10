"""A week of incremental training: each day's run starts from the day before's model.

``python daily.py`` prints recall at 10 on each day's held-out users: of yesterday's
model, of the model after the day's rounds, of the best sellers, and of an oracle that
knows every user's taste.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import work
from numpy.typing import NDArray

import crossfed

Scores = NDArray[np.floating]
Items = NDArray[np.int64]

FOLDER = Path(__file__).parent
SHOPS = 3
DAYS = 7


def train(day: int, runs: Path, **keys: Any) -> crossfed.RunResult:
    """Run the rounds of a day, from the model of the day before."""
    changes: dict[str, Any] = {
        f"sites.{shop}.data.options.day": day for shop in range(SHOPS)
    }
    if day:
        changes |= {"model.weights": str(runs / f"day-{day - 1}"), "rounds": 2}
    return crossfed.simulate(
        FOLDER / "job.toml", changes, folder=runs / f"day-{day}", report=False, **keys
    )


def held_out(day: int) -> work.Pairs:
    """Histories and next items of the held-out users of all shops."""
    parts = [work.purchases(day, seed=1 + shop)[1] for shop in range(SHOPS)]
    history, target = zip(*parts, strict=True)
    return np.concatenate(history), np.concatenate(target)


def recall(scores: Scores, history: Items, target: Items) -> float:
    """How often the next item is among the ten with the highest scores.

    Nobody buys an item twice, so those of the history do not count.
    """
    scores = np.concatenate([scores, np.zeros((len(scores), 1))], axis=1)
    np.put_along_axis(scores, history, -np.inf, axis=1)
    best = np.argsort(-scores[:, : work.NUM_ITEMS], axis=1)[:, :10]
    return float((best == target[:, None]).any(axis=1).mean())


def of_model(result: crossfed.RunResult, day: int) -> float:
    """Recall of a model on a day."""
    history, target = held_out(day)
    model = work.net()
    model.load_state_dict(result.state_dict())
    with torch.no_grad():
        return recall(model(torch.from_numpy(history)).numpy(), history, target)


def of_oracle(day: int) -> float:
    """Recall if taste and appeal are known: the taste is that of most items bought."""
    history, target = held_out(day)
    by_taste = work.probabilities(day)
    padded = np.concatenate([by_taste, np.ones((len(by_taste), 1))], axis=1)
    likelihood = np.log(np.maximum(padded, 1e-12))
    taste = likelihood[:, history].sum(axis=2).argmax(axis=0)
    return recall(by_taste[taste], history, target)


def of_best_sellers(day: int) -> float:
    """Recall of the day's most frequent items, the same for everybody."""
    history, target = held_out(day)
    sales = work.probabilities(day).mean(axis=0)
    return recall(np.repeat(sales[None], len(target), axis=0), history, target)


def main(runs: Path) -> None:
    """Train for a week and print a row for each day."""
    print("day  yesterday's model  today's model  best sellers  oracle")
    before = None
    for day in range(DAYS):
        result = train(day, runs)
        old = "" if before is None else f"{of_model(before, day):.3f}"
        row = (of_model(result, day), of_best_sellers(day), of_oracle(day))
        print(f"{day:>3}  {old:>17}  {row[0]:>13.3f}  {row[1]:>12.3f}  {row[2]:>6.3f}")
        before = result


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs"))
