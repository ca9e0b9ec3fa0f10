"""The share of time in which sites train, by bandwidth: computed, and measured.

    python studies/thin_lines/utilisation.py [--parts virtual billion measured]
        [--mbit 1000 100 10] [--overlap 0.5] [--local-steps 30]
        [--step-seconds 0.25] [--rounds 6] [--out FILE] [--table] [--smoke]

Rows are synchronous data parallel training (a ring, by formula) and DiLoCo with
H = 30, in float32 and, secure, in four levels with the opened sum on its way down, each
without and with `training.overlap_steps`.

`virtual`: 1.3M parameters; the product's own virtual engine sends every message, and
lets each take its latency and its bytes divided by the line's width. `billion`: 1B
parameters and also H = 100; nothing is trained, the product's sizes of messages and its
model of time (`federation/rounds/cost.py`) give the seconds. Both leave out the time
for encoding, masking and adding up. `measured`: `crossfed up` brings up four sites,
each in a network of its own behind a line of that width, which train 1.3M parameters; a
step takes `--step-seconds` by waiting (`paced_model.py`), so that the sites do not
compete for this machine's cores. `predicted` is the model of time, whose one constant,
seconds that messages take besides their bytes, comes from the measurement without
overlap at the widest line (`calibrates`).

All figures are those of rounds after the second: the first sends the whole model and
16 bits. JSON lines go to FILE (`runs/thin-lines-utilisation.jsonl`); rows in it are not
run again. `--smoke` takes seconds and its figures do not count.
"""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "benchmarks"))

import machine  # noqa: E402 -- beside the benchmarks
import measured_lines  # noqa: E402 -- beside this script
import results  # noqa: E402
import torch  # noqa: E402
from exchanges import ring_bytes  # noqa: E402
from results import Result  # noqa: E402
from rows import read  # noqa: E402

from clients.models import gpt  # noqa: E402
from deploy.cli import job_check  # noqa: E402
from deploy.wiring.parts import build_federation  # noqa: E402
from deploy.wiring.rehearsal import rehearse  # noqa: E402
from deploy.wiring.simulation import simulate  # noqa: E402
from federation.clock import SystemClock  # noqa: E402
from federation.events import Event, RoundFinished  # noqa: E402
from federation.ids import new_run_id  # noqa: E402
from federation.job import job_file  # noqa: E402
from federation.job.spec import JobSpec, MachineSpec  # noqa: E402
from federation.rounds import cost  # noqa: E402
from federation.rounds.traffic import Traffic  # noqa: E402
from federation.vectors import Layout, Role  # noqa: E402
from privacy.secagg.protocol.sizes import sizes  # noqa: E402

PARTS = ("virtual", "billion", "measured")
_MBIT = 1e6 / 8  # Bytes per second.
_STEADY = 3  # The first round that is like all later ones.
_SECURE: Mapping[str, Any] = {
    "privacy.secure_aggregation": {"enabled": True, "levels": 4, "clip_norm": 100.0},
    "communication.down_content": "sum",
}
CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "DiLoCo, fp32": {},
    "DiLoCo, 4 levels, secure": _SECURE,
}
DDP, DDP_OVERLAPPED = "DDP", "DDP, exchange during backward"
_BACKWARD = 2 / 3  # Of a step.
_BILLION = {
    "vocabulary": 50257,
    "context": 1024,
    "layers": 18,
    "heads": 16,
    "width": 2048,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of model and run; the model is trained on single, short records.

    Attributes:
        model: Options of ``clients.models:gpt``.
        local_steps: Of a round.
        rounds: Of a run.
        max_bytes: Of the data.
    """

    model: Mapping[str, int]
    local_steps: int
    rounds: int
    max_bytes: int = 400_000


SMALL = Size(  # 1.29M parameters.
    model={"context": 16, "layers": 4, "heads": 4, "width": 160},
    local_steps=30,
    rounds=6,
)
SMOKE = Size(
    model={"context": 16, "layers": 1, "heads": 4, "width": 16},
    local_steps=4,
    rounds=4,
    # Enough for held-out text at every site, whichever modules a Python comes with.
    max_bytes=2_000_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How sites exchange.

    Attributes:
        name: A key of ``CONTENTS``.
        overlap: Steps that may be taken while messages are on their way.
        local_steps: Of a round.
        step_seconds: Of a site.
        mbit: Of its line.
    """

    name: str
    overlap: int
    local_steps: int
    step_seconds: float
    mbit: float

    def facts(self) -> Result:
        """What a row says of it."""
        return {
            "way": self.name,
            "overlap_steps": self.overlap,
            "local_steps": self.local_steps,
            "step_seconds": self.step_seconds,
            "mbit": self.mbit,
        }

    def utilisation(self, seconds: float) -> float:
        """The share of a round of so many seconds in which a site trains."""
        return self.local_steps * self.step_seconds / seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked for.

    Attributes:
        size: Of the model.
        mbits: Widths of lines.
        overlap: Of the ways that have one, as a share of a round's steps.
        step_seconds: Of the ways that are trained.
        out: Where rows are.
    """

    size: Size
    mbits: Sequence[float]
    overlap: float
    step_seconds: float
    out: Path

    def ways(self, local_steps: int, step_seconds: float) -> Iterator[Way]:
        """Widest lines first; on each, ways without overlap first."""
        for mbit in sorted(self.mbits, reverse=True):
            for share in (0.0, self.overlap):
                for name in CONTENTS:
                    yield Way(
                        name=name,
                        overlap=round(share * local_steps),
                        local_steps=local_steps,
                        step_seconds=step_seconds,
                        mbit=mbit,
                    )


def main() -> None:
    options = _options()
    with contextlib.ExitStack() as stack:
        out = options.out or Path("runs/thin-lines-utilisation.jsonl")
        parts = options.parts
        if options.smoke:
            parts = [part for part in parts if part != "measured"]
            if options.out is None:
                out = Path(stack.enter_context(TemporaryDirectory())) / "rows.jsonl"
        size = replace(SMALL, rounds=options.rounds, local_steps=options.local_steps)
        if options.smoke:
            size = SMOKE
        plan = Plan(
            size=size,
            mbits=options.mbit,
            overlap=options.overlap,
            step_seconds=options.step_seconds,
            out=out,
        )
        if not options.table:
            out.parent.mkdir(parents=True, exist_ok=True)
            results.add(out, machine.facts("thin_lines_utilisation"))
            for part in parts:
                _MEASURES[part](plan)
        print(table(results.finished(out).values()), file=sys.stderr)


def _virtual(plan: Plan) -> None:
    """Run jobs on the virtual engine, and predict them by the model of time."""
    size, known = plan.size, dict[str, Traffic]()
    for way in plan.ways(size.local_steps, plan.step_seconds):
        key = results.key_of(part="virtual", **way.facts(), size=_size_facts(size))
        if key in results.finished(plan.out):
            continue
        job = job_of(way, size)
        seen: list[Event] = []
        simulate(job, engine="virtual", listeners=[seen.append], report=False)
        seconds = steady_seconds(seen)
        # Neither lines nor steps change what messages hold.
        if way.name not in known:
            known[way.name] = traffic_of_job(job)
        traffic = replace(known[way.name], job=job)
        row = _row("virtual", way, seconds, traffic)
        results.add(plan.out, {"key": key, **row, "predicted": _predicted(traffic)})
    num_values = traffic_of_job(job_of(next(plan.ways(4, 1.0)), size)).layout.size
    _ring(plan, "virtual", num_values, plan.step_seconds)


def _billion(plan: Plan) -> None:
    """Size the messages of a large model, and give them time."""
    with torch.device("meta"):  # It has no values.
        model = gpt(**_BILLION)  # type: ignore[arg-type]
    layout = Layout.build(
        [
            (name, tuple(value.shape), "float32", Role.PARAMETER)
            for name, value in model.named_parameters()
        ]
    )
    known: dict[str, Traffic] = {}
    for step_seconds in (1.0, 0.1):
        for local_steps in (30, 100):
            for way in plan.ways(local_steps, step_seconds):
                key = results.key_of(part="billion", **way.facts())
                if key in results.finished(plan.out):
                    continue
                job = job_of(way, SMOKE)
                if way.name not in known:
                    known[way.name] = _enlarged(job, layout)
                traffic = replace(known[way.name], job=job)
                seconds = _predicted(traffic)
                row = _row("billion", way, seconds, traffic)
                results.add(plan.out, {"key": key, **row})
        _ring(plan, "billion", layout.size, step_seconds)


def _enlarged(job: JobSpec, layout: Layout) -> Traffic:
    """Size a job's messages as if its model had another layout."""
    small = traffic_of_job(job)
    secure = small.secure
    if secure is not None:
        contract = rehearse(build_federation(job), _RUN, None).contract
        secure = sizes(replace(contract, num_values=layout.size))
    return replace(small, layout=layout, secure=secure)


def _measured(plan: Plan) -> None:
    """Run jobs between networks of this machine."""
    why = measured_lines.refusal()
    if why:
        print(f"nothing is measured: {why}", file=sys.stderr)
        return
    missing: dict[float, list[tuple[str, Way]]] = {}
    for way in plan.ways(plan.size.local_steps, plan.step_seconds):
        key = results.key_of(
            part="measured", **way.facts(), size=_size_facts(plan.size)
        )
        if key not in results.finished(plan.out):
            missing.setdefault(way.mbit, []).append((key, way))
    if not missing:
        return
    with measured_lines.deployment() as here:
        for mbit, ways in missing.items():
            here.up(_document(replace(ways[0][1], name="DiLoCo, fp32"), SMOKE), mbit)
            for key, way in ways:
                results.add(plan.out, {"key": key, **_measure(plan, here, way)})


def _measure(plan: Plan, here: measured_lines.Deployment, way: Way) -> Result:
    document = _document(way, plan.size)
    options = {**plan.size.model, "seconds": way.step_seconds}
    document["model"] = {"factory": measured_lines.MODEL, "options": options}
    del document["simulation"]
    before = here.interface_bytes()
    view = here.run(document)
    after = here.interface_bytes()
    counted = sum(number - before.get(name, 0) for name, number in after.items())
    events = view.read_events()
    finished = [event for event in events if isinstance(event, RoundFinished)]
    seconds = steady_seconds(events)
    traffic = traffic_of_job(job_of(way, plan.size))
    bare = _predicted(traffic)
    beside = _beside(plan, way)
    found = {
        **_row("measured", way, seconds, traffic),
        "rounds": plan.size.rounds,
        "payload_bytes": sum(each.bytes_up + each.bytes_down for each in finished),
        "interface_bytes": counted,
        "load": results.load(),
        "calibrates": beside is None,
    }
    if beside is None:
        return {**found, "beside_seconds": max(0.0, seconds - bare)}
    predicted = _predicted(traffic, latency=beside / 2)
    error = predicted / seconds - 1
    return {**found, "predicted": predicted, "error": error}


def _beside(plan: Plan, way: Way) -> float | None:
    """Seconds of a round's messages besides their bytes, as the widest line showed."""
    for row in results.finished(plan.out).values():
        if row.get("calibrates") and row["way"] == way.name:
            beside: float = row["beside_seconds"]
            return beside
    return None


def _ring(plan: Plan, part: str, num_values: int, step_seconds: float) -> None:
    """Add synchronous training by formula: it waits at every step for the ring."""
    num_sites = len(read(HERE / "rows.toml", "smoke").job["sites"])
    sent = ring_bytes(num_values, num_sites)
    for mbit in plan.mbits:
        exchange = sent / (mbit * _MBIT)
        forward = (1 - _BACKWARD) * step_seconds
        ways = {
            DDP: step_seconds + exchange,
            DDP_OVERLAPPED: forward + max(_BACKWARD * step_seconds, exchange),
        }
        for name, seconds in ways.items():
            facts = {"way": name, "mbit": mbit, "step_seconds": step_seconds}
            key = results.key_of(part=part, **facts, values=num_values)
            if key in results.finished(plan.out):
                continue
            row = {
                "key": key,
                "part": part,
                **facts,
                "overlap_steps": 0,
                "local_steps": 1,
                "parameters": num_values,
                "round_seconds": seconds,
                "utilisation": step_seconds / seconds,
                "bytes_up_a_step": sent,
                "bytes_down_a_step": sent,
            }
            results.add(plan.out, row)


def _row(part: str, way: Way, seconds: float, traffic: Traffic) -> Result:
    """Columns of a row; bytes are those of one site at a step, of a later round."""
    down, up = traffic.of_round(_STEADY)
    share = len(traffic.job.sites) * way.local_steps
    return {
        "part": part,
        **way.facts(),
        "parameters": traffic.layout.size,
        "round_seconds": seconds,
        "utilisation": way.utilisation(seconds),
        "bytes_up_a_step": up.high / share,
        "bytes_down_a_step": down.high / share,
    }


def _document(way: Way, size: Size) -> dict[str, Any]:
    """The job of a way, in which a second trains ``1 / step_seconds`` records."""
    study = read(HERE / "rows.toml", "smoke")
    document: dict[str, Any] = {**study.job, "name": "thin", "rounds": size.rounds}
    document = {k: dict(v) if isinstance(v, dict) else v for k, v in document.items()}
    machines = [
        {
            "site": site["name"],
            "examples_per_second": 1 / way.step_seconds,
            "up_mbit": way.mbit,
            "down_mbit": way.mbit,
        }
        for site in document["sites"]
    ]
    keys = {
        "model.options": dict(size.model),
        "data.options": {"context": size.model["context"], "max_bytes": size.max_bytes},
        "training.max_tokens": size.model["context"],
        "training.local_steps": way.local_steps,
        "training.batch_size": 1,
        "training.overlap_steps": way.overlap,
        "training.optimizer": {"name": "adamw", "lr": 1e-3},
        "aggregation.server_optimizer": {
            "name": "nesterov",
            "lr": 0.7,
            "momentum": 0.9,
        },
        "evaluation.every": 0,
        "simulation.machines": machines,
        **CONTENTS[way.name],
    }
    for key, value in keys.items():
        job_file.override(document, key, value)
    return document


def job_of(way: Way, size: Size) -> JobSpec:
    """The same as a job."""
    return job_file.parse(_document(way, size))


def traffic_of_job(job: JobSpec) -> Traffic:
    """Size a job's messages."""
    found = job_check.sizes_of(build_federation(job), clock=SystemClock())
    assert found is not None
    return found


def steady_seconds(events: Iterable[Event]) -> float:
    """Mean seconds from the end of a round to that of the next, after the second."""
    ends = [event.at for event in events if isinstance(event, RoundFinished)]
    later = ends[_STEADY - 2 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def _predicted(traffic: Traffic, *, latency: float = 0.0) -> float:
    """Mean seconds of the rounds after the second, by the model of time."""
    machines: list[MachineSpec] = [
        replace(machine, latency_seconds=latency)
        for machine in traffic.job.simulation.machines
    ]
    speeds = cost.machine_speeds(machines)
    rounds = range(_STEADY, traffic.job.rounds + 1)
    return statistics.fmean(cost.round_seconds(traffic, i, speeds) for i in rounds)


def _size_facts(size: Size) -> Result:
    return {"model": dict(size.model), "rounds": size.rounds}


def table(found: Iterable[Result]) -> str:
    """Write rows as a table in Markdown."""
    text = [
        "| part | way | H | overlap | s a step | Mbit/s | trains | s a round | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        error = row.get("error")
        cells = [
            row["part"],
            row["way"],
            f"{row['local_steps']}",
            f"{row['overlap_steps']}",
            f"{row['step_seconds']:g}",
            f"{row['mbit']:g}",
            f"{row['utilisation']:.1%}",
            f"{row['round_seconds']:.2f}",
            "-" if error is None else f"{error:+.1%}",
        ]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join(text)


_RUN = new_run_id(0.0, bytes(3))
_MEASURES = {"virtual": _virtual, "billion": _billion, "measured": _measured}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--mbit", nargs="*", type=float, default=[1000.0, 100.0, 10.0])
    parser.add_argument("--overlap", type=float, default=0.5, help="part of steps")
    parser.add_argument("--local-steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--step-seconds", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--smoke", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
