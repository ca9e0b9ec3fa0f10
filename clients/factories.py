"""Import and call the ``module:function`` strings of a job file.

Models and data of a user come in through here, and so do their mistakes: each
becomes an error that names the key of the job file. Nothing is registered.

Nothing else in ``clients`` imports by a name from a job. A site's policy checks every
text of the job that ``import_factory`` would take, also inside options. So pass such a
text on as it is: a name that is put together here would pass the policy unseen.
"""

import difflib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.abc import SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from clients.user_code import place_of, sentence
from federation.errors import FederationError, JobError, UserCodeError, clash
from federation.job import code_files
from federation.job.metrics import is_function

Factory = Callable[..., Any]

_PREFIX = "crossfed_code_"  # of the private names of users' files


def import_factory(path: str, *, key: str | None = None) -> Factory:
    """Import the function that a ``module:function`` string names.

    Args:
        path: For example ``clients.models:digits_cnn`` or ``./my_model.py:net``.
        key: Key of the job file that holds ``path``.

    Raises:
        JobError: ``path`` has another form, or names nothing that can be called.
    """
    file, path = code_files.parse(path), code_files.unpinned(path)
    where, _, name = path.rpartition(":")
    if file is not None:
        module = _import_file(file, key=key)
    elif is_function(path) and not where.endswith(".py"):
        module = _import_module(where, where, key=key)
    else:
        raise JobError(
            f"{path!r} is not of the form module:function, for example "
            "clients.models:digits_cnn, or ./file.py:function",
            key=key,
        )
    if not hasattr(module, name):
        known = [n for n in dir(module) if not n.startswith("_")]
        hint = _nearest(name, known) or _reason(clash(where))
        what = "the file" if file else "module"
        raise JobError(f"{what} {where!r} has no {name!r}{hint}", key=key)
    factory = getattr(module, name)
    if not callable(factory):
        raise JobError(
            f"{path!r} is a {type(factory).__name__}, not a function", key=key
        )
    return factory  # type: ignore[no-any-return]


def is_in_users_file(obj: object) -> bool:
    """Whether a class or function is of a ``./file.py``, which only we can import."""
    return str(getattr(obj, "__module__", "")).startswith(_PREFIX)


def call_factory(
    factory: Factory, options: Mapping[str, Any], *, key: str | None = None
) -> Any:
    """Call a factory with the options of the job file.

    Args:
        factory: From ``import_factory``.
        options: Its keyword arguments.
        key: Key of the job file that holds ``options``.

    Raises:
        JobError: The factory does not take these options, or needs others.
        UserCodeError: The factory itself failed; the cause is kept.
    """
    check_options(factory, options, key=key)
    try:
        return factory(**options)
    except FederationError:
        raise
    except Exception as error:
        # Foreign code may raise anything. This translates and does not continue.
        raise UserCodeError(name_of(factory), error, place_of(error)) from error


class _Code(SourceLoader):
    """Loads the files of one digest, as modules below a private name.

    Nothing else is found below that name: what runs is what was hashed.
    """

    def __init__(self, package: str, sources: code_files.Sources) -> None:
        self._files = {f"{package}.{n}".rstrip("."): f for n, f in sources.items()}
        self._contents = dict(sources.values())
        self._packages = {
            name[: dot.start()]
            for name in self._files
            for dot in re.finditer("[.]", name)
        }

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: object = None
    ) -> ModuleSpec | None:
        inside: list[str] | None = [] if name in self._packages else None
        if name in self._files:
            return spec_from_file_location(
                name, loader=self, submodule_search_locations=inside
            )
        # A folder without __init__.py.
        return None if inside is None else ModuleSpec(name, None, is_package=True)

    def get_filename(self, name: str) -> str:
        return self._files[name][0]

    def get_data(self, path: str) -> bytes:
        return self._contents[path]


def _import_file(file: code_files.CodeFile, *, key: str | None) -> ModuleType:
    try:
        sources = file.sources()
    except JobError as error:
        raise JobError(error.reason, key=key, outside=error.outside) from error
    package = _PREFIX + code_files.digest_of(sources)[:32]
    if package not in sys.modules:
        sys.meta_path.append(_Code(package, sources))
    folder = Path(sources[file.module][0]).parent
    return _import_module(f"{package}.{file.module}", file.path, key=key, folder=folder)


def _import_module(
    name: str, shown: str, *, key: str | None, folder: Path | None = None
) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        hint = _reason(clash(missing))
        if name == missing or name.startswith(f"{missing}."):
            hint = hint or ": install it, or put its folder on PYTHONPATH"
            raise JobError(f"there is no module {missing!r}{hint}", key=key) from error
        missing = re.sub(rf"{_PREFIX}\w+", "", missing)
        hint = hint or _absent(missing, folder)
        raise JobError(f"{shown!r} needs {missing!r}{hint}", key=key) from error
    except Exception as error:
        # As in call_factory: importing a user's module runs foreign code.
        # Of ``import deploy; deploy.mine``, and ``from deploy import mine``.
        ours = getattr(getattr(error, "obj", None), "__name__", "")
        hint = clash(ours or getattr(error, "name", None) or "")
        text = re.sub(rf"{_PREFIX}\w+", "", sentence(error))
        fault = f"module {shown!r} cannot be imported"
        raise JobError(
            f"{fault}: {text}{_reason(hint) if hint not in text else ''}",
            key=key,
            outside=f"{fault}: {type(error).__name__}",
        ) from error


def _absent(module: str, folder: Path | None) -> str:
    """Why a file in a folder finds no module: what is beside it needs a dot."""
    name = module.lstrip(".").partition(".")[0]
    if folder and any((folder / each).exists() for each in (name, f"{name}.py")):
        return f", which is beside it: import it with a dot, from .{name} import ..."
    if module.startswith("."):
        return f": there is no {name}.py beside it"
    return ", which is not installed"


def _reason(text: str) -> str:
    return text and f": {text}"


def check_options(
    factory: Factory, options: Mapping[str, Any], *, key: str | None
) -> None:
    """Refuse options that a function does not take.

    Raises:
        JobError: The first one; the message names those that it takes.
    """
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # Some functions written in C hide theirs.
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        known = [
            p.name
            for p in signature.parameters.values()
            if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
        ]
        unknown = next((name for name in options if name not in known), None)
        hint = "" if unknown is None else _nearest(unknown, known)
        raise JobError(
            f"{name_of(factory)}: {error}{hint}; its options are "
            f"{', '.join(known) or 'none'}",
            key=key,
        ) from None


def needed_options(
    factory: Factory, given: Mapping[str, Any], otherwise: object
) -> dict[str, Any]:
    """Return the options that a function needs, and the given ones that it takes.

    Args:
        factory: From ``import_factory``; ``check_options`` has refused its options.
        given: Known values.
        otherwise: Stands for a value that is not known.
    """
    return {
        p.name: given.get(p.name, otherwise)
        for p in inspect.signature(factory).parameters.values()
        if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}
        and (p.default is p.empty or p.name in given)
    }


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def name_of(factory: Factory) -> str:
    """Name a function by its file or module, for people."""
    while isinstance(factory, partial):
        factory = factory.func
    module = getattr(factory, "__module__", type(factory).__module__)
    if module.startswith(_PREFIX):
        module = f"{module.partition('.')[2].replace('.', '/')}.py"
    return f"{module}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"
