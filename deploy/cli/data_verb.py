"""The verb ``data`` of the command line: datasets in object storage."""

import argparse
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from deploy.cli.arguments import Verbs, add_root
from deploy.cli.store_arguments import (
    KEY_WORDS,
    add_cloud_key,
    add_key,
    add_service,
    key,
    service,
)
from deploy.cli.terminal import say, say_json
from deploy.exit_codes import DONE
from federation.errors import JobError

if TYPE_CHECKING:
    from clients.shards.write import Progress


_MIB = 1024 * 1024


def add_verb(verbs: Verbs, common: argparse.ArgumentParser) -> None:
    """Add the verb to those of the command line."""
    data = verbs.add_parser("data", help="put datasets into object storage")
    inner = data.add_subparsers(required=True, metavar="VERB")
    _add_shard(inner, common)
    _add_info(inner, common)
    _add_balance(inner, common)


def _add_shard(inner: Verbs, common: argparse.ArgumentParser) -> None:
    shard = inner.add_parser(
        "shard",
        parents=[common],
        help="write a dataset as shards; again after a kill, it goes on",
    )
    shard.add_argument(
        "source", metavar="SOURCE", help="module:function, as in a job, or a URL"
    )
    shard.add_argument("url", metavar="URL", help="where to: file://, s3:// or gs://")
    shard.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an option of the source, for example seed=1",
    )
    shard.add_argument("--name", help="name of the dataset (SOURCE)")
    shard.add_argument(
        "--format",
        choices=("tar", "parquet"),
        default="tar",
        help="WebDataset's tar files (default), or Parquet for tables",
    )
    shard.add_argument(
        "--shard-size",
        type=float,
        default=32.0,
        metavar="MIB",
        help="size of a shard (32), about",
    )
    shard.add_argument(
        "--workers", type=int, default=4, help="shards made and sent at once (4)"
    )
    shard.add_argument(
        "--replace",
        action="store_true",
        help="replace another version and delete its shards",
    )
    add_cloud_key(shard)
    add_service(shard)
    add_key(shard, f"encrypt it here with {KEY_WORDS}")
    shard.set_defaults(verb=_shard)


def _add_info(inner: Verbs, common: argparse.ArgumentParser) -> None:
    info = inner.add_parser(
        "info",
        parents=[common],
        help="show size, classes and shards of a dataset",
    )
    info.add_argument("url", metavar="URL", help="what data shard wrote to")
    info.add_argument(
        "--verify",
        action="store_true",
        help="read everything and hold it against the index",
    )
    add_service(info)
    add_key(info, f"of an encrypted dataset: {KEY_WORDS}")
    info.set_defaults(verb=_info)


def _add_balance(inner: Verbs, common: argparse.ArgumentParser) -> None:
    balance = inner.add_parser(
        "balance",
        parents=[common],
        help="show how evenly a run's sites were loaded, and the shares that are even",
    )
    balance.add_argument(
        "run", metavar="RUN", help="folder, run id or job name; it measured the speeds"
    )
    add_root(balance)
    balance.set_defaults(verb=_balance)


def _shard(options: argparse.Namespace) -> int:
    from deploy.wiring import job_data as data  # noqa: PLC0415 -- imports torch

    with _progress() as report:
        found = data.shard(
            options.source,
            options.url,
            _options(options.option),
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
        say("every shard is what the index says")
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
            "\nThis job has every site take local_steps, however much it holds: with "
            "local_epochs a round takes as long as an epoch here says."
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


def _options(texts: list[str]) -> dict[str, Any]:
    """Read KEY=VALUE as in a job; what is no value of TOML is a text."""
    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier():
            raise JobError(f"{text!r} is not KEY=VALUE", key="--option")
        try:
            found[name] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[name] = value
    return found


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
            f"{last[0].kept_objects} objects were there already",
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
                f"           shares of classes differ from shard to shard by up to "
                f"{part['class_imbalance']:.1%}"
            )
