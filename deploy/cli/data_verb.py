"""The verb ``data`` of the command line: datasets in object storage."""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import key, service, source_options
from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE

if TYPE_CHECKING:
    from clients.shards.write import Progress


_MIB = 1024 * 1024


def _shard(options: argparse.Namespace) -> int:
    from deploy.wiring import job_data as data  # noqa: PLC0415 -- imports torch

    with _progress() as report:
        found = data.shard(
            options.source,
            options.url,
            source_options(options.option),
            name=options.name or options.source,
            service=service(options),
            encryption=key(options),
            encoding=options.format,
            shard_bytes=int(options.shard_size * _MIB),
            workers=options.workers,
            replace=options.replace,
            report=report,
        )
    _print(found, options)
    return DONE


def _info(options: argparse.Namespace) -> int:
    from deploy.wiring import job_data as data  # noqa: PLC0415 -- imports torch

    found = data.info(
        options.url,
        service=service(options),
        encryption=key(options),
        verify=options.verify,
    )
    _print(found, options)
    if options.verify and not options.json:
        say("every shard matches the index")
    return DONE


def _balance(options: argparse.Namespace) -> int:
    from deploy.tools import balance  # noqa: PLC0415 -- imports torch
    from monitoring.runs.find import find_run  # noqa: PLC0415

    found = balance.of_run(find_run(options.run, options.root))
    if options.json:
        say_json(found)
        return DONE
    _print_balance("as it was", found["now"])
    if found["proportional"] is not None:
        _print_balance("by speed", found["proportional"])
        speeds = ", ".join(map(str, found["speeds"]))
        say("\nin the job, below [data]:")
        say(f'partition = {{ kind = "proportional", speeds = [{speeds}] }}')
    if found["same_steps"]:
        say(
            "\nIn this job every site takes local_steps steps, however much data it "
            "holds. With local_epochs, a round takes as long as the epoch shown here."
        )
    return DONE


def _print_balance(title: str, found: Mapping[str, Any]) -> None:
    width = max(len("site"), *(len(row["site"]) for row in found["sites"]))
    say(f"{title}: an epoch takes {found['seconds']:.3g} s, {found['idle']:.1%} idle")
    say(f"  {'site':<{width}}  examples  examples/s  load  seconds")
    for row in found["sites"]:
        say(
            f"  {row['site']:<{width}}  {row['examples']:>8,}  {row['speed']:>10,.4g}  "
            f"{row['load']:>4.2f}  {row['seconds']:>7.3g}"
        )


@contextmanager
def _progress() -> Iterator[Callable[["Progress"], None]]:
    """Show a bar on a terminal, and one line at the end in a pipe."""
    from rich.console import Console  # noqa: PLC0415 -- keeps `--help` fast
    from rich.progress import Progress as Bar  # noqa: PLC0415

    console = Console(stderr=True)
    last: list[Progress] = []
    if console.is_terminal and not console.is_dumb_terminal:
        with Bar(console=console) as bar:
            task = bar.add_task("examples")

            def show(now: "Progress") -> None:
                last[:] = [now]
                bar.update(task, completed=now.examples, total=now.of_examples)

            yield show
    else:
        yield lambda now: last.__setitem__(slice(None), [now])
    if last:
        console.print(
            f"crossfed: {last[0].sent_bytes:,} bytes of examples sent, "
            f"{last[0].kept_objects} objects were already there",
            highlight=False,
        )


def _print(found: Mapping[str, Any], options: argparse.Namespace) -> None:
    if options.json:
        say_json(found)
        return
    for name in ("dataset", "url", "version", "encoding"):
        say(f"{name:<9}  {found[name]}")
    if found["encrypted"]:
        say(f"{'key':<9}  {options.encryption_key}")
    for name in ("train", "held_out"):
        part = found[name]
        shape = " x ".join(map(str, part["input_shape"])) or "one number"
        say(
            f"{name:<9}  {part['examples']:,} examples ({shape}) in {part['shards']:,} "
            f"shards of {part['smallest_shard']:,} to {part['largest_shard']:,}, "
            f"{part['bytes']:,} bytes"
        )
        if part["classes"]:
            counts = ", ".join(f"{k}: {v:,}" for k, v in part["classes"].items())
            say(f"           classes {counts}")
            say(
                "           class shares differ between shards by up to "
                f"{part['class_imbalance']:.1%}"
            )


VERBS = {
    "data shard": _shard,
    "data info": _info,
    "data balance": _balance,
}
