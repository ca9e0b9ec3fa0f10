"""What a fork of ``forked.Server`` does; ``fork_imports`` has what it needs soon.

A child is the command and nothing else: it runs ``deploy.cli.commands.main``, or
``misfortunes.run`` if it is to be killed at some point.
"""

import atexit
import importlib
import inspect
import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import deploy.cli.commands


def _child(order: dict[str, Any]) -> NoReturn:
    os.setsid()
    for number, name in ((1, "stdout"), (2, "stderr")):
        mode = os.O_APPEND if order.get("appends") else os.O_TRUNC
        file = os.open(order[name], os.O_WRONLY | os.O_CREAT | mode, 0o600)
        os.dup2(file, number)
        os.close(file)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.umask(0o022)  # As a shell has it; the command is to keep its files to itself.
    os.chdir(order["folder"])
    os.environ.update(order["environment"])
    if order["misfortune"]:
        from support import misfortunes  # noqa: PLC0415 -- imports torch

        misfortunes.prepare(order["misfortune"])
    finish(lambda: _run(order["script"], order["call"], order["arguments"]))


def finish(run: Callable[[], object]) -> NoReturn:
    """Run, and end as the interpreter would."""
    code: object = 1
    try:
        code = run()
    except SystemExit as leaving:
        code = leaving.code
        if isinstance(code, str):
            sys.stderr.write(f"{code}\n")
    except BaseException:  # noqa: BLE001 -- what the interpreter does with it
        sys.excepthook(*sys.exc_info())
    _end(code if isinstance(code, int) else int(code is not None))


def _run(script: str, call: str, arguments: list[str]) -> object:
    """Do what the interpreter does with a script, or call; or run the command."""
    if call:
        return call_entry(call, arguments)
    if not script:
        return deploy.cli.commands.main(arguments)
    return run_script(script, arguments)


def run_script(script: str, arguments: list[str]) -> object:
    """Run a file as ``__main__``, with its folder as the first that imports search."""
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    return 0


def call_entry(name: str, arguments: list[str]) -> object:
    """Call ``module:function``, which takes arguments or finds them in ``sys.argv``."""
    module, _, function = name.partition(":")
    entry = getattr(importlib.import_module(module), function)
    sys.argv[1:] = arguments
    return entry(arguments) if inspect.signature(entry).parameters else entry()


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but free no modules: that takes it a second."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
