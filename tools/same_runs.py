"""Run small jobs in two checkouts, and say where models, events or digests differ.

    python tools/same_runs.py OLD NEW [NAME ...]

For changes that must not change what is computed. Each job switches on one method; OLD
and NEW are folders with a `.venv` of their own. A model is compared by its bytes, so
both must run on this machine. Times, hosts and random identifiers are not compared.
Exit code 1 if anything differs.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BASE = """
name = "{name}"
rounds = 3
model = {{ factory = "clients.models:digits_cnn"{model} }}
data = {{ source = "clients.data:digits"{data} }}
{top}
[training]
local_steps = 6
batch_size = 16
{training}
{tables}
[[sites]]
name = "a"
[[sites]]
name = "b"
[[sites]]
name = "c"
"""
JOBS: dict[str, dict[str, str]] = {
    "plain": {},
    "epochs": {"epochs": "local_epochs = 1"},
    "proximal": {"training": "proximal_mu = 0.1"},
    "normalized": {
        "epochs": "local_epochs = 1",
        "training": "normalized_steps = 4",
    },
    "kept_momentum": {
        "training": 'optimizer = { name = "sgd", lr = 0.05, momentum = 0.9, '
        'state = "keep" }'
    },
    "adamw_warmup": {
        "training": 'optimizer = { name = "adamw", lr = 1e-3, weight_decay = 0.1 }\n'
        'learning_rate = { name = "cosine", warmup_steps = 3 }\nclip_grad_norm = 0.5'
    },
    "control_variates": {
        "training": "control_variates = true",
        "tables": '[aggregation]\nweights = "uniform"',
    },
    "feddyn": {
        "training": "dynamic_alpha = 0.1",
        "tables": '[aggregation]\nserver_optimizer = { name = "running_sum" }',
    },
    "overlap": {"training": "overlap_steps = 2"},
    "accumulate": {"training": "accumulate = 2"},
    "personal": {"model": ', personal = ["*.bias"]'},
    "frozen": {"model": ', frozen = ["*.bias"]'},
    "fedadam": {
        "tables": '[aggregation]\nserver_optimizer = { name = "adam", lr = 0.01 }'
    },
    "median": {"tables": '[aggregation]\ncombine = "median"\nweights = "uniform"'},
    "ema": {"tables": '[selection]\nmodel = "ema"'},
    "top_k": {"tables": '[communication]\ncodec = { name = "top_k", fraction = 0.1 }'},
    "int8_change": {
        "tables": '[communication]\ncodec = { name = "int8" }\n'
        'down_codec = { name = "int8" }\ndown_content = "change"'
    },
    "levels": {
        "tables": "[privacy.secure_aggregation]\nenabled = true\nlevels = 4\n"
        '[aggregation]\nweights = "uniform"',
        "random": "masks and rounding",
    },
    "secure": {
        "tables": "[privacy.secure_aggregation]\nenabled = true",
        "random": "masks and rounding",
    },
    "record": {
        "tables": '[privacy.differential_privacy]\nunit = "record"\n'
        'target_epsilon = 8.0\n[aggregation]\nweights = "uniform"',
        "random": "noise",
    },
}
# Events and fields that differ between two runs of one checkout.
_UNSTEADY = ("StoreUsed", "CheckpointSaved")
_VARIES = (
    "seconds",
    "_at",
    "at",
    "bytes",
    "bytes_up",
    "run_id",
    "version",
    "host",
    "resources",
)


def text_of(name: str) -> str:
    """The job's file."""
    given = dict.fromkeys(("model", "data", "top", "training", "tables"), "")
    job = JOBS[name]
    text = BASE.format(
        name=name, **(given | {k: v for k, v in job.items() if k in given})
    )
    if "epochs" in job:
        text = text.replace("local_steps = 6", job["epochs"])
    return text


def digest(checkout: Path, job: Path) -> str:
    """The digest of a job in a checkout."""
    code = (
        "import pathlib, sys; from federation.job import job_digest, job_file; "
        "path = pathlib.Path(sys.argv[1]); "
        "print(job_digest.digest(job_file.load(path)).hex())"
    )
    return _run([checkout / ".venv/bin/python", "-I", "-c", code, job]).strip()


def result(checkout: Path, job: Path, out: Path) -> tuple[Any, bytes]:
    """Events and model of a job in a checkout."""
    crossfed = checkout / ".venv/bin/crossfed"
    _run([crossfed, "simulate", job, "--out", out, "--no-report"])
    lines = map(json.loads, (out / "events.jsonl").read_text().splitlines())
    (model,) = out.glob("**/model.safetensors")
    steady = [
        json.dumps(_steady(line), sort_keys=True)
        for line in lines
        if line["event"] not in _UNSTEADY
    ]
    return sorted(steady), model.read_bytes()  # Sites answer in any order.


def _steady(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _steady(v) for k, v in value.items() if not k.endswith(_VARIES)}
    if isinstance(value, list):
        return [_steady(each) for each in value]
    return value


def _run(words: list[Any]) -> str:
    done = subprocess.run(  # noqa: S603 -- our own programs
        [*map(str, words)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}:\n{done.stderr}")
    return done.stdout


def main() -> None:
    """Compare all jobs, or those that are named."""
    old, new, *names = sys.argv[1:]
    is_same = True
    with tempfile.TemporaryDirectory() as folder:
        for name in names or JOBS:
            job = Path(folder, f"{name}.toml")
            job.write_text(text_of(name))
            found = {"digest": digest(Path(old), job) == digest(Path(new), job)}
            if "random" not in JOBS[name]:
                sides = [
                    result(Path(each), job, Path(folder, f"{name}-{number}"))
                    for number, each in enumerate((old, new))
                ]
                found |= {
                    what: sides[0][place] == sides[1][place]
                    for place, what in enumerate(("events", "model"))
                }
                for lines in zip(sides[0][0], sides[1][0], strict=False):
                    if lines[0] != lines[1]:
                        print(*lines, sep="\n")
                        break
            differs = [what for what, same in found.items() if not same]
            print(
                f"{name}: {', '.join(differs) + ' differ' if differs else 'the same'}"
            )
            is_same = is_same and not differs
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
