"""CPU time of a deployed site that evaluates a model, beside a plain loop of torch.

    python benchmarks/evaluate.py [--turns 3] [--records 20000] [--hidden 4096 4096]

A real federation of one site, to which the model travels encrypted through a store in
a folder. A run evaluates a network on held-out records. Another process does the same
with torch alone: it makes the records, builds the network, loads the file and goes
through the records, in one thread like the site. They take turns; the first, in which
the site imports what it needs, does not count. The site's CPU time is that of its whole
process from the start of a run to its end: handshake, download, checks, evaluation and
answer.

JSON lines on stdout, the machine first; a table on stderr.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import machine

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from support.deployment import Deployment, deployed, descendants  # noqa: E402

from cloud_adapters.keys.key_file import add_key  # noqa: E402

SITE, MODEL = "site-a", "model.safetensors"
INPUTS, CLASSES, BATCH = 64, 10, 256
POLICY = """
privacy = "none"
secure_aggregation = false
functions = ["clients.models:mlp", "./work.py:records"]
"""
EXCHANGE = """
[exchange]
url = "file://{folder}/store"
threshold_mb = 1
encryption = {{ key = "file:{folder}/a.key" }}
"""
JOB = """
name = "benchmark"
rounds = 1
data = {{ source = "./work.py:records" }}
evaluation = {{ batch_size = {batch} }}
training = {{ local_steps = 1, batch_size = 1 }}
sites = [{{ name = "{site}" }}]
[model]
factory = "clients.models:mlp"
options = {{ inputs = {inputs}, classes = {classes}, hidden = {hidden} }}
"""
WORK = """
import numpy as np

from clients.data import Examples


def records():
    draw = np.random.default_rng(1)
    inputs = draw.normal(size=({records}, {inputs})).astype("float32")
    targets = draw.integers(0, {classes}, size={records})
    few = Examples(inputs=inputs[:8], targets=targets[:8])
    return few, Examples(inputs=inputs, targets=targets)
"""


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, of those below it, and of those that they have awaited."""
    ticks = 0
    for each in {pid, *descendants(pid)}:
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def by_itself(folder: Path, hidden: Sequence[int]) -> float:
    """Evaluate with torch alone; its CPU time. For a process of its own."""
    import torch
    from safetensors.torch import load_file

    from clients.models import mlp

    torch.set_num_threads(1)
    sys.path.insert(0, str(folder))
    import work

    torch.nn.Linear(INPUTS, CLASSES)(torch.zeros(BATCH, INPUTS))  # As the site, warm.
    begin = time.process_time()
    _, held_out = work.records()
    model = mlp(INPUTS, CLASSES, hidden)
    model.load_state_dict(load_file(folder / MODEL))
    loss, correct = 0.0, 0
    with torch.no_grad():
        for at in range(0, len(held_out.targets), BATCH):
            inputs = torch.from_numpy(held_out.inputs[at : at + BATCH])
            targets = torch.from_numpy(held_out.targets[at : at + BATCH])
            logits = model(inputs)
            loss += float(
                torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            )
            correct += int((logits.argmax(1) == targets).sum())
    return time.process_time() - begin


def alone(folder: Path, hidden: Sequence[int]) -> float:
    """Have another process evaluate; its CPU time."""
    widths = (str(width) for width in hidden)
    words = [sys.executable, __file__, "--alone", str(folder), "--hidden", *widths]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    return float(done.stdout)


def write_model(folder: Path, hidden: Sequence[int]) -> int:
    """Write a new network's weights; the size of the file."""
    from safetensors.torch import save_file

    from clients.models import mlp

    save_file(mlp(INPUTS, CLASSES, hidden).state_dict(), folder / MODEL)
    return (folder / MODEL).stat().st_size


@contextmanager
def federation(folder: Path, num_records: int, job: str) -> Iterator[Deployment]:
    """A site that has the records, beside its aggregator."""
    add_key(folder / "a.key")
    exchange = EXCHANGE.format(folder=folder)
    text = WORK.format(records=num_records, inputs=INPUTS, classes=CLASSES)
    policy = POLICY + exchange
    with deployed(folder, policy, sites=[SITE], forked=False, started=False) as made:
        with Path(made.config).open("a") as config:
            config.write(exchange)
        for place in (folder, folder / "aggregator", folder / SITE):
            (place / "work.py").write_text(text)
        (folder / "job.toml").write_text(job)
        made.start_site(SITE)
        yield made


def at_site(made: Deployment) -> float:
    """Evaluate in a run; the CPU time of the site."""
    pid = made.processes[SITE].pid
    begin = cpu_seconds(pid)
    words = ("run", str(made.folder / "job.toml"), "--aggregator", made.config)
    process = made.follow(*words, "--evaluate", str(made.folder / MODEL), "--json")
    _, said = process.communicate()
    if process.returncode:
        raise SystemExit(said)
    time.sleep(1)  # The end of the run is known at the site.
    return cpu_seconds(pid) - begin


def measure(
    num_turns: int, num_records: int, hidden: Sequence[int]
) -> Iterator[dict[str, float]]:
    """Evaluate in turn, once more for the site to import what it needs."""
    job = JOB.format(
        batch=BATCH, site=SITE, inputs=INPUTS, classes=CLASSES, hidden=[*hidden]
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "federation"
        folder.mkdir(mode=0o700)
        num_bytes = write_model(folder, hidden)
        with federation(folder, num_records, job) as made:
            for turn in range(num_turns + 1):
                yield {
                    "turn": turn,
                    "model_mb": num_bytes / 1e6,
                    "alone_cpu_seconds": alone(folder, hidden),
                    "site_cpu_seconds": at_site(made),
                    "load": os.getloadavg()[0],
                }


def main() -> None:
    """Measure, and compare medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--records", type=int, default=20_000)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 4096, 1800])
    parser.add_argument("--alone", type=Path, help="used by the script itself")
    options = parser.parse_args()
    if options.alone:
        print(by_itself(options.alone, options.hidden))
        return
    print(json.dumps(machine.facts("evaluate", records=options.records)), flush=True)
    rows = []
    for row in measure(options.turns, options.records, options.hidden):
        print(json.dumps(row), flush=True)
        rows.append(row)
        plain, site = row["alone_cpu_seconds"], row["site_cpu_seconds"]
        text = f"turn {row['turn']:.0f}: alone {plain:.2f} s, site {site:.2f} s"
        print(text, file=sys.stderr)
    rows = rows[1:]  # The first imports, and is not compared.
    plain, site = (
        statistics.median(row[f"{what}_cpu_seconds"] for row in rows)
        for what in ("alone", "site")
    )
    print(json.dumps({"alone": plain, "site": site, "over": site / plain - 1}))
    text = f"median: {plain:.2f} s alone, {site:.2f} s at the site: {site / plain:.2f}"
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
