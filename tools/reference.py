"""Generate ``docs/reference`` from the code: ``reference.py [--check]``.

With ``--check`` nothing is written; the exit code is 1 if a page on the disk is not
what the code says.
"""

import argparse
import dataclasses
import enum
import functools
import inspect
import re
import sys
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from deploy import exit_codes
from deploy.aggregator_host import config as aggregator_file
from deploy.cli import commands as cli
from deploy.fleet.spec import DeploymentFile
from deploy.site_host import config as site_file
from deploy.tuning import space as search_space
from federation import errors, event_log, events, messages
from federation.job import disclosure, spec as job
from federation.job.job_keys import documented
from federation.methods.method import Method
from federation.methods.registry import METHODS
from federation.rounds import cost
from federation.wire import frame as wire, wire_fields, wire_values

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path("docs/reference")
NOTE = "<!-- Written by tools/reference.py from the code: edit the code, not this. -->"

# Event names stand for their tables; these are the parts that several share.
_PARTS = (events.SiteShare, messages.MetricSums, messages.Phase)
_TRAVELLERS = (
    messages.RoundTask,
    messages.SiteUpdate,
    messages.SiteEvaluation,
    messages.SiteFailure,
    messages.SecureTask,
    messages.SecureAnswer,
    messages.MaskedUpdate,
)
_REQUIRED = "**required**"
_EMPTY = ("", "`{}`", "`[]`", '`""`')  # Defaults that say nothing.
# Arguments of so many verbs are described once.
_COMMON = 3
_WORDS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    bytes: "bytes",
    type(None): "nothing",
}

_JOB_FILE = "One TOML file describes one job. Most jobs need these ten keys:"
_FIRST_JOB = """\
```toml
name = "patients"
rounds = 20

[model]
factory = "./work.py:net"     # your function, which returns a torch.nn.Module

[data]
source = "./work.py:records"  # your function, which returns (train, held_out)

[training]
task = "binary"               # what the model predicts
local_epochs = 1              # passes over a site's records in a round
batch_size = 32
optimizer = { name = "adam", lr = 1e-3 }

[[sites]]                     # a simulation splits the data among these
name = "north"

[[sites]]
name = "south"
```

All other keys are optional. A key that is not listed is an error. \
`crossfed check-job JOB` checks a file without training, and names all errors."""
_SITE_FILE = (
    "`site.toml` holds the decisions of a site's operator, which no job can change. "
    "`crossfed enroll` creates it; `crossfed doctor --site FILE` checks it."
)
_DISCLOSURE = """\
The last three columns show the form in which a number may exist with differential \
privacy, with secure aggregation and in deployed runs; `-` means unrestricted. If \
several apply, the strictest counts. A field that may not exist in the form that it \
has is empty in `events.jsonl`, on the terminal and in the report. Fields that are not \
listed are unrestricted: they are about the whole run, all parties know them, the \
aggregator sees them in every message, a site computes them from public settings, or \
sites noise them."""

_SEARCH_FILE = """\
What `crossfed tune` searches ([how-to](../howto/tune.md)). `[space]` has a table for
each key of the job, by its dotted name."""

_SPEEDS_FILE = """\
Speeds and prices of sites and connections for `crossfed check-job JOB --speeds FILE`. \
The prediction is only as good as these numbers: measure them, or take them from a \
bill. A key that is not listed here is an error."""

_AGGREGATOR_FILE = (
    "`aggregator.toml` holds the decisions of the aggregator's operator. `crossfed "
    "aggregator init` creates it."
)
_DEPLOYMENT_FILE = (
    "A deployment file says which machines a federation runs on. `crossfed up FILE` "
    "starts them and `crossfed down FILE` ends them "
    "([how-to](../howto/one-command.md)). What a run computes is in its job."
)
_EVERY_EVENT = (
    "Every event has `at`, when it happened. Events of a round have `round_index`, the "
    "number of the round, from 1; those about a site's answer have `bytes_down` and "
    "`bytes_up`, the bytes sent to the site and received from it. The lists below have "
    "these only if they mean more."
)
_EXPLAINED = {
    ("at", "When."),
    ("round_index", "1 for the first."),
    ("round_index", "Number of the round, from 1."),
    ("bytes_down", "Bytes sent to the site for this task."),
    ("bytes_up", "Bytes received from the site."),
    *((name, "") for name in ("run_id", "round_index", "site")),
    ("run_id", "ID of the run; messages of other runs are rejected."),
    ("round_index", "The round of the task."),
    ("site", "The site that gets the task."),
    ("site", "The site that answers."),
    ("phases", "Where the site's time went; empty with differential privacy."),
    ("spent", "With differential privacy, what the site has spent."),
    ("based_on", "As in the task."),
    ("fragment", "As in the task."),
    ("leaving", "Why the site leaves after this round; None if it stays."),
}
_EVERY_MESSAGE = (
    "Every message names its run (`run_id`; others are rejected), its round "
    "(`round_index`) and the site that gets or answers the task (`site`). An answer "
    "repeats its task's `based_on` and `fragment`, and may have `phases`, where the "
    "site's time went (empty with differential privacy); `spent`, what it has spent "
    "with differential privacy; and `leaving`, why it leaves after this round. The "
    "lists below have these only if they mean something else."
)
_WIRE_PARTS = (
    "[Events](events.md#parts-of-events) describe `MetricSums`, `Phase` and "
    "`FailureKind`, which messages and events share."
)
_COMBINATIONS = """\
`crossfed check-job` and every start of a run refuse these jobs, and say what to write \
instead. Each pair is listed once, under one of its two names: search the page for \
both. What is not listed can be combined.

*Only with it* lists keys that have no effect without the method, or another one that \
lists them; *without effect* lists keys that have none with it."""
_WHY_PRIVATE = """\
This is why methods keep the guarantees of [differential \
privacy](../explanation/differential-privacy.md). A method that is missing here is \
refused with it."""
_OVERRIDES = (
    "Every key can be replaced on the command line: `--set training.optimizer.lr=0.1`, "
    "`--set sites.0.name=here` for an entry of a list, `--set schedule.minimum_sites=` "
    "to unset a key."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the pages, or check them, and return the exit code."""
    parser = argparse.ArgumentParser(description="Generate docs/reference.")
    parser.add_argument("--check", action="store_true", help="write nothing; compare")
    if not parser.parse_args(arguments).check:
        write(ROOT)
        return 0
    found = stale(ROOT)
    for path in found:
        print(f"{path} is out of date; run `make docs`", file=sys.stderr)
    return 1 if found else 0


def pages() -> dict[Path, str]:
    """Every page by its path from the root of the repository."""
    makers: Mapping[str, Callable[[], Iterable[str]]] = {
        "job-file.md": _job_file,
        "site-file.md": _site_file,
        "aggregator-file.md": _aggregator_file,
        "deployment-file.md": _deployment_file,
        "search-file.md": _search_file,
        "speeds-file.md": _speeds_file,
        "cli.md": _cli,
        "errors.md": _errors,
        "combinations.md": _combinations,
        "events.md": _events,
        "disclosure.md": _disclosure,
        "wire.md": _wire,
    }
    found = {}
    for name, make in makers.items():
        text = "\n".join([NOTE, "", *make()])
        found[FOLDER / name] = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    return found


def write(root: Path) -> None:
    """Write every page under ``root``."""
    for path, text in pages().items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text, encoding="utf-8")


def stale(root: Path) -> list[Path]:
    """Pages under ``root`` that are missing or not what the code says."""
    return [
        path
        for path, text in pages().items()
        if not (root / path).is_file()
        or (root / path).read_text(encoding="utf-8") != text
    ]


def _job_file() -> Iterator[str]:
    yield from ("# Job file", "", _JOB_FILE, "", _FIRST_JOB, "", _OVERRIDES, "")
    yield from _job_table(job.JobSpec, "", "job-file.md")


def _site_file() -> Iterator[str]:
    yield from ("# Site file", "", _SITE_FILE, "")
    yield from _job_table(site_file.SiteFile, "", "site-file.md")


def _aggregator_file() -> Iterator[str]:
    yield from ("# Aggregator file", "", _AGGREGATOR_FILE, "")
    yield from _job_table(aggregator_file.AggregatorFile, "", "aggregator-file.md")


def _deployment_file() -> Iterator[str]:
    yield from ("# Deployment file", "", _DEPLOYMENT_FILE, "")
    yield from _job_table(DeploymentFile, "", "deployment-file.md")


def _search_file() -> Iterator[str]:
    yield from ("# Search file", "", _SEARCH_FILE, "")
    yield from _job_table(search_space.TuneSpec, "", "search-file.md")


def _speeds_file() -> Iterator[str]:
    yield from ("# Speeds file", "", _SPEEDS_FILE, "")
    yield from _job_table(cost.Speeds, "", "speeds-file.md")


def _combinations() -> Iterator[str]:
    yield from ("# What cannot be combined", "", _COMBINATIONS, "")
    places = dict[tuple[str, str], str]()  # Where a thing is refused for a reason.
    promises = dict[str, list[str]]()
    for method in METHODS:
        if method.private_because:
            promises.setdefault(method.private_because, []).append(method.name)
        title = f"{_sentence(method.name)[:-1]}: `{method.setting}`"
        link = f"[{method.name}](#{_slug(title)})"
        if rows := [*_refusals(method, link, places), *_keys(method)]:
            yield from (f"## {title}", "", *rows, "")
    yield from ("## With differential privacy", "", _WHY_PRIVATE, "")
    for reason, names in promises.items():
        yield f"- **{_sentence(', '.join(names))}** {_sentence(reason)}"


def _refusals(
    method: Method, link: str, places: dict[tuple[str, str], str]
) -> Iterator[str]:
    """What a method excludes by reason, or the method that said the same before."""
    said = dict[str, list[str]]()
    before = dict[str, list[str]]()
    for thing, whole in method.excluded.items():
        reason, _, _ = whole.partition(": ")  # The rest is what to write instead.
        place = places.setdefault((thing, reason), link)
        if place == link:
            said.setdefault(reason, []).append(thing)
        else:
            before.setdefault(place, []).append(thing)
    for reason, things in said.items():
        yield f"- **{_sentence(', '.join(things))}** {_sentence(reason)}"
    for place, things in before.items():
        yield f"- **{_sentence(', '.join(things))}** See {place}."


def _keys(method: Method) -> Iterator[str]:
    """Keys that a method needs or makes useless."""
    for label, keys in (
        ("Only with it", method.parts),
        ("Without effect", method.ignores),
    ):
        if keys:
            yield f"- *{label}:* {', '.join(f'`{key}`' for key in keys)}."
    for thing in method.only_with_it:
        yield f"- *Only with it:* {thing}."


def _disclosure() -> Iterator[str]:
    yield from ("# What events may reveal", "", _DISCLOSURE, "")
    yield "| Event | Fields | What they are | Private | Secure | Deployed |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for kind, by_rule in disclosure.TABLE.items():
        for (rule, holds), names in by_rule.items():
            listed = ", ".join(f"`{name}`" for name in names.split())
            forms = [
                "-"
                if disclosure.strictness(form) <= disclosure.strictness(holds)
                else form
                for form in (rule.private, rule.secure, rule.deployed)
            ]
            if any(form != "-" for form in forms):
                yield f"| {kind} | {listed} | {rule.why} | {' | '.join(forms)} |"


@functools.cache
def _homes() -> Mapping[type, tuple[str, str]]:
    """Page and name of the place that lists the keys of each kind of table."""
    found: dict[type, tuple[str, str]] = {}
    roots = {
        "site-file.md": site_file.SiteFile,
        "job-file.md": job.JobSpec,
        "aggregator-file.md": aggregator_file.AggregatorFile,
        "deployment-file.md": DeploymentFile,
    }
    for page, root in roots.items():
        waiting = [(root, "")]
        while waiting:
            spec, name = waiting.pop(0)
            found.setdefault(spec, (page, name))
            waiting += [(table, full) for table, full, _, _ in _inner(spec, name)]
    return found


def _inner(spec: type, name: str) -> Iterator[tuple[type, str, bool, bool]]:
    """Each table inside a table, its name, and whether it is a list or required."""
    hints = typing.get_type_hints(spec)
    for field in dataclasses.fields(spec):
        table = _table_in(hints[field.name])
        if table is not None:
            full = f"{name}.{field.name}" if name else field.name
            listed = typing.get_origin(hints[field.name]) is tuple
            yield table, full, listed, _default(field) == _REQUIRED


def _job_table(
    spec: type, name: str, page: str, *, is_list: bool = False
) -> Iterator[str]:
    """One table of a file and, after it, those inside it."""
    title = "Top level" if not name else f"`[[{name}]]`" if is_list else f"`[{name}]`"
    text, said = documented(spec)
    yield from (f"## {title}", "", text, "")
    hints = typing.get_type_hints(spec)
    for field in dataclasses.fields(spec):
        if _table_in(hints[field.name]) is None:
            yield _key(field, hints[field.name], said[field.name])
    yield ""
    inner = list(_inner(spec, name))
    if inner:
        links = (
            f"[`{full}`]({_home(table, full, page)})"
            + (" (required)" if required else "")
            for table, full, _, required in inner
        )
        yield from (f"Tables inside: {', '.join(links)}.", "")
    for table, full, listed, _ in inner:
        if _home(table, full, page) == f"#{_slug(full)}":
            yield from _job_table(table, full, page, is_list=listed)


def _home(table: type, name: str, page: str) -> str:
    """Where the keys of a table are listed: once, for all files that have it."""
    home, known = _homes().get(table, (page, name))
    return f"{'' if home == page else home}#{_slug(known)}"


def _table_in(hint: Any) -> type | None:
    """The dataclass that a field holds, if it holds one."""
    for part in (hint, *typing.get_args(hint)):
        if isinstance(part, type) and dataclasses.is_dataclass(part):
            return part
    return None


def _key(field: "dataclasses.Field[Any]", hint: Any, said: str) -> str:
    """A key with its type, unless that shows in the default, and its default."""
    first, *others = _type(hint).split(" or ")  # A range is that of the first.
    facts = " or ".join((first + _values(field.metadata, said), *others))
    default = _default(field)
    if default in _EMPTY:
        default = ""
    elif default != _REQUIRED:
        if facts in {_WORDS[bool], _WORDS[str]}:
            facts = ""
        default = f"default {default}"
    return f"- `{field.name}` ({'; '.join(filter(None, (facts, default)))}): {said}"


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else f"`{_toml(field.default)}`"
    if field.default_factory is not dataclasses.MISSING:
        return "`{}`"
    return _REQUIRED


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _values(facts: Mapping[str, Any], said: str) -> str:
    """Range of a key, and its choices unless the text explains each of them."""
    if not facts:
        return ""
    choices = [f"`{word}`" for word in facts["choices"]]
    listed = f": {', '.join(choices)}" if any(w not in said for w in choices) else ""
    words = {"above": " above", "low": " from", "below": ", below", "high": " to"}
    limits = facts["bounds"]
    return listed + "".join(
        f"{word} {limits[key]:g}".replace("e+0", "e")
        for key, word in words.items()
        if limits[key] is not None
    )


def _cli() -> Iterator[str]:
    yield from ("# Command line", "", *_prose(cli), "")
    yield from (*_prose(exit_codes), "")
    verbs = list(_verbs(cli._parser(), "crossfed"))  # noqa: SLF001 -- flags are its
    counts = Counter(row for _, _, rows in verbs for row in rows)
    usual = dict[str, tuple[str, str]]()  # What most verbs mean by it.
    for row, num in counts.most_common():
        if num >= _COMMON:
            usual.setdefault(row[0], row)
    common = [row for row in counts if row in usual.values()]
    yield from ("## Common arguments", "")
    yield from (*(f"- {flag}: {said}" for flag, said in common), "")
    everywhere = [
        row for row in common if all(row in rows for _, _, rows in verbs if rows)
    ]
    every_verb = " and ".join(flag for flag, _ in everywhere)
    yield from (f"Every verb takes {every_verb}.", "")
    for title, text, rows in verbs:
        if not rows:  # The verbs inside it follow.
            continue
        yield from (f"## `{title}`", "", text, "")
        yield from (
            f"- {flag}: {said}" for flag, said in rows if (flag, said) not in common
        )
        shared = [row[0] for row in rows if row in common and row not in everywhere]
        if shared:
            names = ", ".join(f"{flag.split()[0].rstrip('`')}`" for flag in shared)
            yield f"- [Common](#common-arguments): {names}."
        yield ""


def _verbs(
    parser: argparse.ArgumentParser, prefix: str
) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Every verb with its arguments, and the verbs inside it."""
    for action in parser._actions:  # noqa: SLF001 -- argparse has no public list
        if not isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            continue
        for name, verb in action.choices.items():
            title = f"{prefix} {name}"
            yield title, _sentence(verb.description or ""), list(_arguments(verb))
            yield from _verbs(verb, title)


def _arguments(verb: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in verb._actions:  # noqa: SLF001 -- argparse has no public list
        skipped = (argparse._HelpAction, argparse._SubParsersAction)  # noqa: SLF001
        if isinstance(action, skipped):
            continue
        metavar = action.metavar
        if action.nargs == 0:
            metavar = None
        elif metavar is None and action.choices is not None:
            metavar = "|".join(filter(None, map(str, action.choices)))
        elif metavar is None:
            metavar = action.dest.upper()
        flags = ", ".join(action.option_strings)
        text = " ".join(filter(None, (flags, str(metavar) if metavar else "")))
        default = action.default
        said = action.help or ""
        is_new = isinstance(default, (str, Path)) and f"({default})" not in said
        note = f" Default: `{default}`." if is_new and str(default) else ""
        yield f"`{text}`", _sentence(said) + note


def _errors() -> Iterator[str]:
    yield from ("# Errors", "", *_prose(errors), "")
    wrong_job = ", ".join(f"`{kind.__name__}`" for kind in exit_codes.BAD_JOB_ERRORS)
    yield (
        f"The command line exits with 2 for {wrong_job}, with 3 for `BudgetExceeded`, "
        "and with 1 for the others."
    )
    yield ""
    yield from _branch(errors.FederationError, level=0)


def _branch(kind: type[Exception], level: int) -> Iterator[str]:
    """An error and, indented, those that are kinds of it."""
    yield f"{'    ' * level}- `{kind.__name__}`: {_markdown(_summary(kind))}"
    for member in vars(errors).values():
        if isinstance(member, type) and kind in member.__bases__:
            yield from _branch(member, level + 1)


def _events() -> Iterator[str]:
    yield from ("# Events", "", *_prose(events), "")
    yield from ("## The file `events.jsonl`", "", *_prose(event_log), "")
    yield from (_EVERY_EVENT, "")
    for kind in event_log.KINDS.values():
        yield from _described(kind, level=2)
    yield from ("## Parts of events", "")
    for part in _PARTS:
        yield from _described(part, level=3)
    yield from _words(messages.FailureKind, level=3)


def _wire() -> Iterator[str]:
    yield from ("# Wire format", "", f"Version {wire.VERSION}.", "", *_prose(wire), "")
    yield from ("## Limits", "", "A frame that exceeds one is a `WireError`.", "")
    pattern = re.compile(r"^(MAX_\w+) = (.+?)(?:\s+# (.+))?$", re.MULTILINE)
    rows = [
        (f"`{name}`", f"{getattr(wire, name):,}", _sentence(comment or ""))
        for module in (wire, wire_fields, wire_values)
        for name, _, comment in pattern.findall(inspect.getsource(module))
    ]
    yield from _table(("Limit", "Value", "Note"), rows)
    yield from ("## Messages", "", _EVERY_MESSAGE, "")
    for kind in _TRAVELLERS:
        yield from _described(kind, level=3)
    yield from _words(messages.SecureStep, level=3)
    yield from (_WIRE_PARTS, "")


def _described(kind: type, *, level: int) -> Iterator[str]:
    """A dataclass: heading, docstring, fields that are not explained yet."""
    text, attributes = documented(kind)
    yield from (f"{'#' * level} `{kind.__name__}`", "", _markdown(text), "")
    hints = typing.get_type_hints(kind)
    for f in dataclasses.fields(kind):
        said = _markdown(attributes.get(f.name, ""))
        if (f.name, said) not in _EXPLAINED:
            yield f"- `{f.name}` ({_type(hints[f.name])})" + (said and f": {said}")
    yield ""


def _words(kind: type, *, level: int) -> Iterator[str]:
    """An enumeration: heading, docstring, words."""
    yield from (f"{'#' * level} `{kind.__name__}`", "")
    yield from (_summary(kind), "")
    source = inspect.getsource(kind)
    for word, meaning in re.findall(r'= "(\w+)"  # (.+)', source):
        yield f"- `{word}`: {_sentence(_markdown(meaning))}"
    yield ""


def _prose(module: types.ModuleType) -> Iterator[str]:
    """A module's docstring in Markdown; ``::`` opens a block of plain text."""
    in_block = False
    for line in inspect.cleandoc(module.__doc__ or "").splitlines():
        if in_block and line and not line.startswith(" "):
            in_block = False
            yield from ("```", "")
        if line.endswith("::"):
            in_block = True
            yield from (_markdown(line[:-1]), "", "```text")
        elif in_block:
            if line:
                yield line.removeprefix("    ")
        else:
            yield _markdown(line)


def _type(hint: Any) -> str:
    """A type in words that a reader of TOML or JSON knows."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in {typing.Union, types.UnionType}:
        return " or ".join(_type(part) for part in parts if part is not type(None))
    if origin is tuple:
        inside = parts[:1] if parts[-1] is Ellipsis else parts
        return "list of " + ", ".join(_plural(_type(part)) for part in inside)
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return f"`{hint.__name__}`"
    is_word = isinstance(hint, type) and issubclass(hint, enum.Enum)
    if is_word or isinstance(hint, typing.NewType):
        return _WORDS[str]
    return _WORDS.get(hint, "array" if "ndarray" in str(hint).lower() else "table")


def _plural(words: str) -> str:
    """A type in a list; the name of a class stays as it is."""
    if words.startswith("list of "):
        return words.replace("list", "lists", 1)
    return words if words.startswith("`") or words == "bytes" else f"{words}s"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|{'|'.join(' --- ' for _ in columns)}|"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


def _slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _summary(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "").splitlines()[0]


def _sentence(text: str) -> str:
    """Begin with a capital, unless with the name of a key or file; end with a stop."""
    if not re.match(r"\w+[._:]\w", text):
        text = text[:1].upper() + text[1:]
    return text and text.rstrip(".") + "."


def _markdown(text: str) -> str:
    """Code is between two backticks in docstrings and between one in Markdown."""
    return text.replace("``", "`")


if __name__ == "__main__":
    raise SystemExit(main())
