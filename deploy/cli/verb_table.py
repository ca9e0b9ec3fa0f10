"""The parser of the command line, built from the table in ``verbs.toml``."""

import argparse
import math
import re
import sys
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

Table = Mapping[str, Any]

_TABLE = Path(__file__).with_name("verbs.toml")
_MOST_MINUTES = 7 * 24 * 60
_MINUTES_DIGITS = 5
_MANY = 10  # Choices that a message does not list.
_HOST_PORT = re.compile(r"[^/\s]+:[0-9]{1,5}/?")


# Words of other tools, and what they are called here.
_MEANT: Mapping[str, str] = {
    "compare": "report",
    "create": "new",
    "fit": "simulate",
    "help": "--help",
    "init": "new",
    "list": "runs",
    "status": "ps",
    "train": "simulate",
    "version": "--version",
}

_EXIT_CODES = """\
exit codes: 0 done, 1 failed, 2 wrong job or arguments, 3 privacy budget spent,
4 inconclusive audit, 130 stopped on request"""


class Parser(argparse.ArgumentParser):
    """Accepts no abbreviations of options; its verbs use this class, too."""

    def __init__(self, **settings: Any) -> None:
        """See argparse."""
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **settings)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Suggest similar values, as argparse does from Python 3.14 on."""
        if action.choices is not None and value not in action.choices:
            known = [str(choice) for choice in action.choices]
            near = get_close_matches(str(value), known, n=1)
            other = _MEANT.get(str(value), "")
            if other in known or (other.startswith("--") and "simulate" in known):
                near = [other]
            meant = f"; did you mean {near[0]!r}?" if near else ""
            listed = f" (choices: {', '.join(known)})" if len(known) < _MANY else ""
            text = f"there is no {value!r}{meant}{listed}"
            raise argparse.ArgumentError(action, text)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what is unknown here, with the usage of the verb that it follows."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}"
            )
        return options, unknown

    def _hint(self, unknown: list[str]) -> str:
        """What the first unknown argument may mean."""
        word = unknown[0].partition("=")[0]
        near = get_close_matches(word, self._option_string_actions, n=1, cutoff=0.7)
        if near and word.startswith("--"):
            return f"; did you mean {near[0]}?"
        if self._subparsers is not None:
            return "; options of a verb come after it" if word.startswith("-") else ""
        if "--set" in self._option_string_actions:
            return "; a key of the job is set with --set, for example --set rounds=5"
        return ""


class _ShowVersion(argparse.Action):
    """Print the version, which is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        """See argparse."""
        from importlib import metadata  # noqa: PLC0415 -- keeps `--help` fast

        sys.stdout.write(f"crossfed {metadata.version('crossfed')}\n")
        parser.exit()


class _WithOverview(argparse.RawDescriptionHelpFormatter):
    """Lists no verbs, because the overview does so by group."""

    def _iter_indented_subactions(
        self, _: argparse.Action
    ) -> Generator[argparse.Action, None, None]:
        yield from ()


def parser_of(does: Mapping[str, Callable[[argparse.Namespace], int]]) -> Parser:
    """Make the parser.

    Args:
        does: What each verb does; of a verb inside a verb the name has both words.
    """
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    top = Parser(
        prog="crossfed",
        description="Train one model across clouds without moving data.",
        epilog="\n".join(_overview(table)),
        formatter_class=_WithOverview,
    )
    top.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="show the version and exit"
    )
    inside = {"": top.add_subparsers(required=True, metavar="VERB")}
    for name, about in table["verbs"].items():
        outer, _, word = name.rpartition(" ")
        text = about.pop("help")
        epilog = "\n".join(_epilog(about.pop("examples", ())))
        verb = inside[outer].add_parser(
            word, help=text, description=text, epilog=epilog
        )
        metavar = about.pop("metavar", None)
        if metavar is not None:
            inside[name] = verb.add_subparsers(required=True, metavar=metavar)
            continue
        _add(verb, about, table["shared"])
        verb.set_defaults(verb=does[name])
    return top


def _overview(table: Table) -> Iterator[str]:
    """Verbs by what people do with them."""
    for group, names in table["groups"].items():
        yield f"{group}:"
        for name in names:
            yield f"  {name:<15}{table['verbs'][name]['help']}"
        yield ""
    yield "crossfed VERB --help shows the arguments of a verb, with examples."


def _epilog(examples: Iterable[str]) -> Iterator[str]:
    if examples:
        yield "examples:"
        yield from (f"  crossfed {example}" for example in examples)
        yield ""
    yield _EXIT_CODES


def _add(verb: argparse.ArgumentParser, arguments: Table, shared: Table) -> None:
    """Add arguments to a verb, and the shared ones where they are named."""
    place: argparse._ActionsContainer
    either: argparse._MutuallyExclusiveGroup | None = None
    for names, settings in arguments.items():
        if settings == "shared":
            _add(verb, shared[names], shared)
            continue
        given, place = dict(settings), verb
        if given.pop("either", False):
            # A verb without the first of them asks for it.
            needed = given.get("nargs") != "?"
            either = either or verb.add_mutually_exclusive_group(required=needed)
            place = either
        if "type" in given:
            given["type"] = _TYPES[given["type"]]
        if given.get("action") == "append":
            given["default"] = []
        place.add_argument(*names.split(), **given)


def _named_path(text: str) -> Path:
    """A path that is not empty: an unset shell variable would mean this folder."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def _aggregator(text: str) -> Path | str:
    """The configuration of an aggregator on this host, or the URL of one elsewhere."""
    if text.startswith("https://"):
        return text
    place = text.removeprefix("http://")
    if place != text or (_HOST_PORT.fullmatch(text) and not Path(text).exists()):
        raise argparse.ArgumentTypeError(
            f"an aggregator elsewhere is named as https://HOST:PORT: https://{place}"
        )
    return Path(text)


def _minutes(text: str) -> int:
    # The length first: Python refuses to read a number of thousands of digits.
    minutes = int(text) if text.isdecimal() and len(text) <= _MINUTES_DIGITS else 0
    if not 1 <= minutes <= _MOST_MINUTES:
        raise argparse.ArgumentTypeError(
            f"a token holds 1 to {_MOST_MINUTES} minutes (7 days)"
        )
    return minutes


def _count(text: str) -> int:
    """A number of checkpoints: at least one, or the run could not resume."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text!r}")
    return int(text)


def _amount(text: str) -> float:
    """A finite number that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(
            f"must be a finite number of at least 0, not {text!r:.40}"
        )
    return value


# The names are those of the type that a message of argparse shows.
_TYPES: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "path": Path,
    "named_path": _named_path,
    "aggregator": _aggregator,
    "minutes": _minutes,
    "count": _count,
    "amount": _amount,
}
