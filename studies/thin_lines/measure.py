"""Loss against bytes: synchronous training, DiLoCo, FedAvg and what a file adds.

    python studies/thin_lines/measure.py [--size small] [--seeds 1] [--rows FILE]
        [--only TEXT ...] [--out FILE] [--folder FOLDER] [--table] [--smoke]

Four sites hold different sub-packages of Python's standard library and train a
byte-level GPT. All rows of a seed start from one model, take as many steps at every
site, on the same examples in the same order, and are evaluated on the same held-out
files. `rows.toml` says what they are: jobs, run by `crossfed.simulate`, and synchronous
baselines, whose code is beside this script. Each row tries its learning rates with
seed 0, and the one with the lowest loss runs with the other seeds; so the loss of seed
0 is that of the best of them, for all rows alike.

JSON lines go to FILE (`runs/thin-lines.jsonl`), of which the first tells the machine.
A row that is there is not run again. Columns: `loss` in nats per byte; `bytes_up` and
`bytes_down` of all sites in all rounds, as the product counts them, messages included
(but not the last model, which is sent once more to be evaluated); `x_up`, `x_down` and
`x_both`: how many times more float32 gradients at every step are; `seconds` on this
machine, at whose cores the sites take turns; `course_losses`, the mean training loss of
each round, or of every `course_steps` synchronous steps, and `course_up` and
`course_down`, each round's bytes.
`--table` prints what FILE holds, and runs nothing. `--smoke` is too short for its
figures to count.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))

import machine  # noqa: E402 -- beside the benchmarks
import synchronous  # noqa: E402
from rows import Row, Study, read  # noqa: E402

import crossfed  # noqa: E402
from crossfed import load_job  # noqa: E402

Result = dict[str, Any]

# Synchronous rows tell their training loss as a mean over so many steps.
_WINDOW_STEPS = 30
# More rounds than any run has: models before the last have no loss in a row, and each
# evaluation of 10M parameters takes minutes.
_ONLY_THE_LAST = 1_000_000


def main() -> None:
    options = _options()
    size = "smoke" if options.smoke else options.size
    study = read(options.rows, size)
    wanted = [r for r in study.rows if _is_wanted(r.name, options.only)]
    if options.smoke and options.out is None:
        wanted = [replace(r, learning_rates=r.learning_rates[:1]) for r in wanted]
        with TemporaryDirectory() as folder:
            measure(study, wanted, 1, Path(folder) / "rows.jsonl", Path(folder))
        return
    out = options.out or Path("runs/thin-lines.jsonl")
    if not options.table:
        measure(study, wanted, options.seeds, out, options.folder)
    print(table(study, wanted, finished(out)), file=sys.stderr)


def measure(
    study: Study, wanted: Sequence[Row], num_seeds: int, out: Path, folder: Path
) -> None:
    """Run every row that a file lacks, and add it there and to standard output."""
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = machine.facts("thin_lines", size=study.size.name, seeds=num_seeds)
    _add(out, facts)
    for row, lr in _tries(wanted):
        _run_once(study, row, out, lr=lr, seed=0, folder=folder)
    for seed in range(1, num_seeds):
        for row in wanted:
            lr = best(study, row, finished(out))["learning_rate"]
            _run_once(study, row, out, lr=lr, seed=seed, folder=folder)


def _tries(rows: Sequence[Row]) -> Iterator[tuple[Row, float]]:
    """Yield each row's first rate, then each row's second: a cut leaves even effort."""
    for number in range(max(len(row.learning_rates) for row in rows)):
        for row in rows:
            yield from ((row, lr) for lr in row.learning_rates[number : number + 1])


def _run_once(
    study: Study, row: Row, out: Path, *, lr: float, seed: int, folder: Path
) -> None:
    if study.key(row, lr=lr, seed=seed) not in finished(out):
        _add(out, run(study, row, lr=lr, seed=seed, folder=folder))


def run(study: Study, row: Row, *, lr: float, seed: int, folder: Path) -> Result:
    """Run one row with one learning rate and seed."""
    size, document = study.size, study.document(row, lr=lr, seed=seed)
    # Any row gives the same: what they have in common decides.
    plain = study.document(Row(name="warm", learning_rates=()), lr=1e-3, seed=seed)
    key = study.key(Row(name="warm", learning_rates=()), lr=1e-3, seed=seed)
    warm = (folder / f"thin-lines-{key}.safetensors").absolute()
    synchronous.warm_model(plain, size.warm_up_steps, warm)
    every = {"evaluation.every": _ONLY_THE_LAST}
    job = load_job(document, {"model.weights": str(warm), **every})
    start = time.perf_counter()
    if row.synchronous:
        trained = synchronous.train(job)
        seconds = time.perf_counter() - start
        loss: float | None = synchronous.held_out_loss(
            trained.federation, trained.weights_d, trained.integers_m
        )
        num_values = trained.federation.pool.layout.size
        up = down = synchronous.gradient_bytes(num_values, len(job.sites), size.steps)
        course: Result = {
            "course_steps": _WINDOW_STEPS,
            "course_losses": trained.window_losses(_WINDOW_STEPS),
        }
    else:
        with TemporaryDirectory() as store:
            done = crossfed.simulate(
                job, folder=Path(store) / "run", report=False, progress=False
            )
        seconds = time.perf_counter() - start
        loss, rounds = done.loss, done.history
        up = sum(one["bytes_up"] for one in rounds)
        down = sum(one["bytes_down"] for one in rounds)
        num_values = sum(array.size for array in done.weights.values())
        course = {
            "course_steps": row.local_steps,
            "course_losses": [one["training_loss"] for one in rounds],
            "course_up": [one["bytes_up"] for one in rounds],
            "course_down": [one["bytes_down"] for one in rounds],
        }
    dense = synchronous.gradient_bytes(num_values, len(job.sites), size.steps)
    return {
        "key": study.key(row, lr=lr, seed=seed),
        "row": row.name,
        "size": size.name,
        "seed": seed,
        "learning_rate": lr,
        "steps": study.steps(row),
        "work": row.work,
        "local_steps": row.local_steps,
        "rounds": job.rounds,
        "parameters": num_values,
        "loss": loss,
        "bytes_up": up,
        "bytes_down": down,
        "x_up": dense / up,
        "x_down": dense / down,
        "x_both": 2 * dense / (up + down),
        "seconds": seconds,
        "bytes_from": "formula" if row.synchronous else "run",
        **course,
    }


def finished(out: Path) -> Mapping[str, Result]:
    """Rows of a file by their key; a last line that was cut off is not one."""
    if not out.exists():
        return {}
    *lines, _ = out.read_text().split("\n")
    rows = [json.loads(line) for line in lines]
    return {row["key"]: row for row in rows if "key" in row}


def best(study: Study, row: Row, done: Mapping[str, Result]) -> Result:
    """Return the result of seed 0 whose learning rate gave the lowest loss."""
    return min(tried(study, row, done), key=lambda result: result["loss"])


def tried(study: Study, row: Row, done: Mapping[str, Result]) -> list[Result]:
    """Return the finished results of a row with seed 0."""
    keys = (study.key(row, lr=lr, seed=0) for lr in row.learning_rates)
    return [done[key] for key in keys if key in done]


def table(study: Study, wanted: Iterable[Row], done: Mapping[str, Result]) -> str:
    """Write the finished rows as a table in Markdown, each at its best rate."""
    lines = [
        "| row | rate (of so many) | held-out loss | seeds | up | down | both | s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in wanted:
        first = tried(study, row, done)
        if not first:
            continue
        lr = best(study, row, done)["learning_rate"]
        keys = (study.key(row, lr=lr, seed=seed) for seed in range(len(done)))
        found = [done[key] for key in keys if key in done]
        loss = statistics.mean(r["loss"] for r in found)
        times = [
            f"{statistics.mean(r[key] for r in found):.0f}"
            for key in ("x_up", "x_down", "x_both", "seconds")
        ]
        cells = [row.name, f"{lr:g} ({len(first)})", f"{loss:.3f}", str(len(found))]
        lines.append(f"| {' | '.join([*cells, *times])} |")
    return "\n".join(lines)


def _add(out: Path, row: Mapping[str, Any]) -> None:
    """Append a line to a file, in place of one that was cut off."""
    text = out.read_text() if out.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    line = json.dumps(row)
    if whole != text:
        out.write_text(whole)
    with out.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="small", help="a table of sizes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=HERE / "rows.toml")
    parser.add_argument("--only", nargs="*", default=[], help="parts of rows' names")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--folder", type=Path, default=Path("runs"), help="of models to start from"
    )
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
