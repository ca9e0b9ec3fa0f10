"""Commands where no extra is installed: ``python -m support.core_alone``.

Reads a JSON list of command lines from standard input, runs each in this process with
every package of an extra out of reach, and prints what came of each; and whether they
have imported torch's compiler.
"""

import contextlib
import io
import json
import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# What the extras install themselves, and what comes with them.
OUT_OF_REACH = (
    *("boto3", "botocore", "s3transfer", "jmespath"),
    *("google", "grpc", "proto", "requests"),
    *("flwr", "ray", "fastapi", "httpx", "sqlalchemy", "typer"),
    *("kubernetes", "pyarrow", "mlflow", "tensorboard"),
)

_COMPILER = "torch._dynamo"


class WithoutExtras(PathFinder):
    """Finds none of them, as if nobody had installed them."""

    @classmethod
    def find_spec(cls, name: str, *args: Any) -> ModuleSpec | None:
        if name.partition(".")[0] in OUT_OF_REACH:
            return None
        return super().find_spec(name, *args)


def main() -> None:
    """Run them all."""
    sys.meta_path[sys.meta_path.index(PathFinder)] = WithoutExtras
    from deploy.cli import main as crossfed  # noqa: PLC0415 -- as without the extras

    results = []
    for line in json.load(sys.stdin):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = crossfed(line)
            except SystemExit as end:  # argparse's end of --help.
                code = int(end.code or 0)
        results.append([code, out.getvalue(), err.getvalue()])
    json.dump({"results": results, "compiler": _COMPILER in sys.modules}, sys.stdout)


if __name__ == "__main__":
    main()
