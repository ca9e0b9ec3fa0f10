"""What people would use instead: synchronous methods, over lines of their own.

    python studies/thin_lines/baselines.py [--size small] [--steps N] [--mbit 20]
        [--delay-ms 0] [--pace 0.5] [--only TEXT ...] [--set KEY=VALUE ...]
        [--out FILE] [--table] [--smoke]

Four processes, each the site of a network namespace at the end of a shaped line, train
`measure.py`'s GPT on its data, from its first model, on the same batches, with
`torch.distributed`'s gloo. A parameter server is a fifth host, whose line is not
shaped. `--mbit 0`, and a user who may not make namespaces, means loopback: then nothing
is shaped, and no interface is read.

Columns: `formula_each_way`, bytes that a site sends, and as many that it receives, at
every step by the formula of the method; `interface_up` and `interface_down`, bytes that
its interface counted; `seconds_a_step`; `trains`, the share of this time in which it
trains: the seconds of `--pace`, which a step takes as if a device of its own worked,
or, with `--pace 0`, the processor seconds of its work; `loss`, of all
sites' held-out data, if as many steps were taken as `measure.py` takes; `load` of the
machine. The first step is not counted in any of them. Means over sites.

JSON lines go to FILE (`runs/thin-lines-baselines.jsonl`); rows in it are not run again.
`--smoke` takes seconds, and its figures do not count.
"""

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import statistics
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))

import baseline_rank  # noqa: E402 -- beside this script
import lines  # noqa: E402
import machine  # noqa: E402 -- beside the benchmarks
import results  # noqa: E402
import synchronous  # noqa: E402
from lines import Hosts, Line  # noqa: E402
from results import Result  # noqa: E402
from rows import Row, Study, read  # noqa: E402

from clients.training.local_federation import Federation  # noqa: E402
from crossfed import load_job  # noqa: E402
from deploy.wiring.parts import build_federation  # noqa: E402
from federation.ids import SiteId  # noqa: E402

_TIMEOUT = timedelta(minutes=5)
_ROW = "synchronous AdamW"
_SMOKE_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How all methods of a run train, and over which lines.

    Attributes:
        study: Jobs.
        steps: Of each site.
        learning_rate: Of AdamW.
        line: Of each site.
        pace: See ``baseline_rank``.
        folder: Of models to start from.
    """

    study: Study
    steps: int
    learning_rate: float
    line: Line
    pace: float
    folder: Path

    def document(self, learning_rate: float | None = None) -> dict[str, Any]:
        """The job, without the weights that it starts from."""
        row = next(row for row in self.study.rows if row.name == _ROW)
        rate = learning_rate or self.learning_rate
        return self.study.document(row, lr=rate, seed=0)

    def key(self, method: str) -> str:
        """What a row is found by."""
        return results.key_of(
            method=method,
            job=self.document(),
            line=asdict(self.line),
            pace=self.pace,
            steps=self.steps,
        )


def main() -> None:
    options = _options()
    size = "smoke" if options.smoke else options.size
    study = read(HERE / "rows.toml", size)
    keys = {k: tomllib.loads(f"v = {v}")["v"] for k, v in map(_halves, options.set)}
    study = replace(study, size=replace(study.size, keys={**study.size.keys, **keys}))
    line = Line(mbit=options.mbit, delay_ms=options.delay_ms)
    refusal = lines.refusal() if line != Line() and not options.smoke else ""
    if refusal:
        print(f"no lines, so on loopback: {refusal}", file=sys.stderr)
    is_shaped = line != Line() and not refusal and not options.smoke
    setting = Setting(
        study=study,
        steps=_SMOKE_STEPS if options.smoke else options.steps or study.size.steps,
        learning_rate=options.lr,
        line=line if is_shaped else Line(),
        pace=0.0 if options.smoke else options.pace,
        folder=options.folder,
    )
    wanted = [m for m in baseline_rank.METHODS if _is_wanted(m, options.only)]
    with contextlib.ExitStack() as stack:
        out = options.out or Path("runs/thin-lines-baselines.jsonl")
        if options.smoke and options.out is None:
            scratch = Path(stack.enter_context(TemporaryDirectory()))
            setting = replace(setting, folder=scratch)
            out = scratch / "rows.jsonl"
        if not options.table:
            measure(setting, wanted, out)
        print(table(results.finished(out).values()), file=sys.stderr)


def measure(setting: Setting, wanted: Sequence[str], out: Path) -> None:
    """Run every method that a file lacks."""
    out.parent.mkdir(parents=True, exist_ok=True)
    missing = [m for m in wanted if setting.key(m) not in results.finished(out)]
    if baseline_rank.TORCHFT in missing and not _has_torchft():
        print("torchft is not installed: no row of it", file=sys.stderr)
        missing.remove(baseline_rank.TORCHFT)
    if not missing:
        return
    results.add(
        out, machine.facts("thin_lines_baselines", size=setting.study.size.name)
    )
    torch.set_num_threads(1)
    federation = _federation(setting)
    with _hosts(setting, len(federation.site_data)) as hosts:
        for method in missing:
            results.add(out, run(setting, federation, hosts, method))


def _has_torchft() -> bool:
    return importlib.util.find_spec("torchft") is not None


def _federation(setting: Setting) -> Federation:
    """Model and data of all sites, with the weights that `measure.py` starts from."""
    size = setting.study.size
    # Named, and made, as `measure.py` does it.
    warm = Row(name="warm", learning_rates=())
    key = setting.study.key(warm, lr=1e-3, seed=0)
    path = (setting.folder / f"thin-lines-{key}.safetensors").absolute()
    plain = setting.study.document(warm, lr=1e-3, seed=0)
    synchronous.warm_model(plain, size.warm_up_steps, path)
    return build_federation(load_job(setting.document(), {"model.weights": str(path)}))


@contextlib.contextmanager
def _hosts(setting: Setting, num_sites: int) -> Iterator[Hosts]:
    """A host for each site, and one for a server, whose line is not shaped."""
    if setting.line == Line():
        yield lines.loopback(num_sites + 1)
        return
    with lines.joined([*[setting.line] * num_sites, Line()]) as hosts:
        yield hosts


def run(setting: Setting, federation: Federation, hosts: Hosts, method: str) -> Result:
    """Run a method, with a process for each site and one for the server."""
    num_sites = len(federation.site_data)
    if not hosts.holders:  # A port that was used may not be free yet.
        hosts = lines.loopback(num_sites + 1)
    # Forks have model and data without reading them again.
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as name:
        folder = Path(name)
        arguments = (setting, federation, hosts, (method, folder))
        processes = [
            context.Process(target=_host, args=(rank, *arguments))
            for rank in range(num_sites + 1)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        failed = [str(i) for i, p in enumerate(processes) if p.exitcode]
        if failed:
            raise RuntimeError(f"{method}: hosts {', '.join(failed)} failed; see above")
        found = [json.loads(_file(folder, i).read_text()) for i in range(num_sites)]
        weights_d = np.load(folder / "weights.npy")
    is_whole = setting.steps == setting.study.size.steps
    no_integers = np.zeros(federation.pool.layout.num_integers, np.int64)
    loss = synchronous.held_out_loss(federation, weights_d, no_integers)
    return {
        "key": setting.key(method),
        "method": method,
        "size": setting.study.size.name,
        "sites": num_sites,
        "parameters": federation.pool.layout.size,
        "steps": setting.steps,
        "learning_rate": setting.learning_rate,
        "mbit": setting.line.mbit,
        "delay_ms": setting.line.delay_ms,
        "pace": setting.pace,
        "loss": loss if is_whole else None,
        **{key: _mean([one[key] for one in found]) for key in found[0]},
        "load": results.load(),
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.json"


def _host(
    rank: int,
    setting: Setting,
    federation: Federation,
    hosts: Hosts,
    place: tuple[str, Path],
) -> None:
    """Be one of the hosts of a method, and leave what was found in a folder."""
    method, folder = place
    names = list(federation.site_data)
    server = len(names)
    group = _group(rank, server, hosts)
    if rank == server:
        baseline_rank.serve(
            method,
            num_sites=server,
            num_values=federation.pool.layout.size,
            steps=setting.steps,
        )
    else:
        site = baseline_rank.Site(
            federation=federation,
            name=SiteId(names[rank]),
            rank=rank,
            group=group,
            hosts=hosts,
            times=baseline_rank.Times(setting.pace),
        )
        found, weights_d = baseline_rank.run(method, site, setting.steps)
        _file(folder, rank).write_text(json.dumps(found))
        if rank == 0:
            np.save(folder / "weights.npy", weights_d)
    distributed.barrier()
    distributed.destroy_process_group()


def _group(rank: int, server: int, hosts: Hosts) -> distributed.ProcessGroup:
    """Meet the other hosts; the group of all but the server."""
    hosts.enter(rank)
    os.environ.setdefault("RUST_LOG", "warn")  # Of torchft, which says a lot.
    os.environ["GLOO_SOCKET_IFNAME"] = hosts.interface
    store = TCPStore(
        hosts.addresses[server],
        hosts.port,
        server + 1,
        is_master=rank == server,
        timeout=_TIMEOUT,
    )
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=server + 1, timeout=_TIMEOUT
    )
    sites = list(range(server))
    group: distributed.ProcessGroup = distributed.new_group(sites, timeout=_TIMEOUT)
    return group


def table(found: Iterable[Result]) -> str:
    """Write rows as a table in Markdown."""
    text = [
        "| method | Mbit/s | s a step | trains | MB a step | up | down | loss |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        if "method" not in row:
            continue
        sent = [row["formula_each_way"], row["interface_up"], row["interface_down"]]
        cells = [
            row["method"],
            f"{row['mbit']:g}" if row["mbit"] else "-",
            f"{row['seconds_a_step']:.3f}",
            f"{row['trains']:.1%}",
            *("-" if each is None else f"{each / 1e6:.3f}" for each in sent),
            "-" if row["loss"] is None else f"{row['loss']:.3f}",
        ]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


def _halves(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value


def _is_wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", default="small", help="a table of sizes in rows.toml")
    parser.add_argument("--steps", type=int, help="of each site; fewer give no loss")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way")
    parser.add_argument("--pace", type=float, default=0.5)
    parser.add_argument("--only", nargs="*", default=[], help="parts of methods' names")
    parser.add_argument("--set", nargs="*", default=[], help="KEY=VALUE of the job")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
