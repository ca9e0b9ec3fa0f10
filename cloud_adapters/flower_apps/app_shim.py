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
from flwr.app import Context, Message, MetricRecord, RecordDict
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
        # Set by a ``client_fn``; an app without one has handlers instead.
        if getattr(app, "_call", None) is not None:
            return _ask_client(app, message, context)
        return app(message, context)


def _ask_client(app: ClientApp, message: Message, context: Context) -> Message:
    """Translate for a ``client_fn``: ``Client`` and ``NumPyClient`` have older records.

    The names in the answer are those of newer apps: ``metrics`` with ``num-examples``
    and ``eval_loss``, and the numbers that the client returned by name.

    Raises:
        RuntimeError: The client reports that it failed.
    """
    kind = {"train": "fit", "evaluate": "evaluate"}[message.metadata.message_type]
    ((arrays, parameters),) = message.content.array_records.items()
    (config,) = message.content.config_records.values()
    message.content = RecordDict(
        {f"{kind}ins.parameters": parameters, f"{kind}ins.config": config}
    )
    answer = app(message, context)
    found: Any = answer.content
    status = found[f"{kind}res.status"]
    if status["code"]:
        raise RuntimeError(f"the client's {kind} failed: {status['message']}")
    metrics: dict[str, int | float | list[int] | list[float]] = {
        name: float(value)
        for name, value in found[f"{kind}res.metrics"].items()
        if isinstance(value, int | float)
    }
    metrics["num-examples"] = found[f"{kind}res.num_examples"]["num_examples"]
    told = RecordDict()
    if kind == "fit":
        told[arrays] = found["fitres.parameters"]
    else:
        metrics["eval_loss"] = found["evaluateres.loss"]["loss"]
    told["metrics"] = MetricRecord(metrics)
    answer.content = told
    return answer


def _flat(table: dict[str, Any], before: str = "") -> "list[tuple[str, Any]]":
    """Join the names of nested tables with dots, as Flower does."""
    found = []
    for name, value in table.items():
        inner = isinstance(value, dict)
        whole = before + name
        found += _flat(value, f"{whole}.") if inner else [(whole, value)]
    return found


app = InstalledApp()
