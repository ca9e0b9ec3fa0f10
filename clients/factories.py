"""``module:function`` strings of a job file: how they are imported and called.

Models and data of a user come in through here, and so do their mistakes: each
becomes an error that names the key of the job file. Nothing is registered.
"""

import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from federation.errors import FederationError, JobError, UserCodeError

Factory = Callable[..., Any]

_FORM = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*)")


def import_factory(path: str, *, key: str | None = None) -> Factory:
    """Import the function that a ``module:function`` string names.

    Args:
        path: For example ``clients.models:digits_cnn``.
        key: Key of the job file that holds ``path``.

    Raises:
        JobError: ``path`` has another form, or names nothing that can be called.
    """
    match = _FORM.fullmatch(path)
    if match is None:
        raise JobError(
            f"{path!r} is not of the form module:function, for example "
            "clients.models:digits_cnn",
            key=key,
        )
    module = _import_module(match[1], key=key)
    name = match[2]
    if not hasattr(module, name):
        known = [n for n in dir(module) if not n.startswith("_")]
        raise JobError(
            f"module {match[1]!r} has no {name!r}{_nearest(name, known)}", key=key
        )
    factory = getattr(module, name)
    if not callable(factory):
        raise JobError(
            f"{path!r} is a {type(factory).__name__}, not a function", key=key
        )
    return factory  # type: ignore[no-any-return]


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
    _check_options(factory, options, key=key)
    try:
        return factory(**options)
    except FederationError:
        raise
    except Exception as error:
        # Foreign code may raise anything. This translates and does not go on.
        raise UserCodeError(_name(factory), error) from error


def _import_module(name: str, *, key: str | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name == missing or name.startswith(f"{missing}."):
            raise JobError(
                f"there is no module {missing!r}: install it, or put its folder on "
                "PYTHONPATH",
                key=key,
            ) from error
        raise JobError(
            f"module {name!r} needs {missing!r}, which is not installed", key=key
        ) from error
    except Exception as error:
        # As in call_factory: importing a user's module runs foreign code.
        raise JobError(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}",
            key=key,
            outside=f"module {name!r} cannot be imported: {type(error).__name__}",
        ) from error


def _check_options(
    factory: Factory, options: Mapping[str, Any], *, key: str | None
) -> None:
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
            f"{_name(factory)}: {error}{hint}; its options are "
            f"{', '.join(known) or 'none'}",
            key=key,
        ) from None


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _name(factory: Factory) -> str:
    module = getattr(factory, "__module__", type(factory).__module__)
    return f"{module}:{getattr(factory, '__qualname__', type(factory).__qualname__)}"
