"""Runs the ``ClientApp`` that is installed at a site; a run's bundle holds only this.

A stock SuperNode executes the bundle of a run. This file is in ours as it stands, and
it loads what the site's operator named, and nothing that came with the run. So it may
import only what a machine with Flower and the app has.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

import tomli
from flwr.app import Context, Message
from flwr.clientapp import ClientApp


class InstalledApp(ClientApp):
    """Stands for the app in the folder that ``--node-config`` names."""

    def __call__(self, message: Message, context: Context) -> Message:
        """Let the app answer, with the settings of its own ``pyproject.toml``.

        Raises:
            RuntimeError: The node's configuration lacks its path, or it is not there.
        """
        folder = context.node_config.get("app")
        if not isinstance(folder, str):
            raise RuntimeError(  # noqa: TRY004 -- it is the operator's to set
                "start flower-supernode with --node-config 'app=\"/folder/of/the/app\"'"
            )
        try:
            text = (Path(folder) / "pyproject.toml").read_text(encoding="utf-8")
            about = tomli.loads(text)["tool"]["flwr"]["app"]
            module, _, name = about["components"]["clientapp"].partition(":")
        except (OSError, KeyError, ValueError) as error:
            raise RuntimeError(
                f"{folder} holds no Flower app: {error!r}; its pyproject.toml names "
                "clientapp in [tool.flwr.app.components]"
            ) from error
        sys.path.insert(0, folder)
        app: ClientApp = getattr(importlib.import_module(module), name)
        context.run_config = dict(_flat(about.get("config", {})))
        return app(message, context)


def _flat(table: dict[str, Any], before: str = "") -> "list[tuple[str, Any]]":
    """Join the names of nested tables with dots, as Flower does."""
    found = []
    for name, value in table.items():
        inner = isinstance(value, dict)
        whole = before + name
        found += _flat(value, f"{whole}.") if inner else [(whole, value)]
    return found


app = InstalledApp()
