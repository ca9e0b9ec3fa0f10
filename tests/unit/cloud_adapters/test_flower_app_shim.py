"""What a run's bundle runs at a site: the app that is installed there, or nothing."""

import importlib.util
import shutil
import sys
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_adapters.flower import simulation as flower_simulation

if importlib.util.find_spec("flwr") is None:
    pytest.skip("the flower extra is not installed", allow_module_level=True)
flower_simulation.import_flower()

from flwr.app import (  # noqa: E402
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.supercore.task_identity import TaskIdentity  # noqa: E402

from cloud_adapters.flower_apps import (  # noqa: E402
    app_shim as flower_app_shim,
    bundle as flower_bundle,
)

pytestmark = pytest.mark.flower

PYPROJECT = """
[tool.flwr.app.components]
clientapp = "small.client:app"
[tool.flwr.app.config]
epochs = 3
model.depth = 2
model.inner.width = 4.5
"""
CLIENT = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(msg, context):
    content = RecordDict({"config": ConfigRecord(context.run_config)})
    return Message(content, reply_to=msg)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An app that answers with its settings."""
    (tmp_path / "small").mkdir()
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "small" / "client.py").write_text(CLIENT)
    before = list(sys.path)
    yield tmp_path
    sys.path[:] = before
    for name in ("small", "small.client"):
        sys.modules.pop(name, None)


def call(
    content: RecordDict | None = None, kind: str = "train", **node_config: Any
) -> Message:
    """Have the shim answer, in a run whose own settings do not matter."""
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    context = Context(
        run_id=1,
        node_id=1,
        node_config=node_config,
        state=RecordDict(),
        run_config={"folder": "/etc"},
    )
    return flower_app_shim.app(Message(content or RecordDict(), 1, kind), context)


def test_installed_app_answers_with_its_own_settings(folder: Path):
    """Nested ones under dotted names, as Flower has them."""
    config = dict(call(app=str(folder)).content["config"])
    assert config == {"epochs": 3, "model.depth": 2, "model.inner.width": 4.5}


def test_node_that_names_no_app(folder: Path):
    """The message says how to."""
    for value in ({}, {"app": 3}):
        with pytest.raises(RuntimeError, match="start flower-supernode with"):
            call(**value)


@pytest.mark.parametrize("text", ["", "[tool", "[tool.flwr]\napp = {}"])
def test_folder_without_an_app(folder: Path, text: str):
    """Nothing is imported from it."""
    (folder / "pyproject.toml").write_text(text)
    with pytest.raises(RuntimeError, match="holds no Flower app"):
        call(app=str(folder))
    shutil.rmtree(folder)
    with pytest.raises(RuntimeError, match="holds no Flower app: FileNotFound"):
        call(app=str(folder))
    assert "small.client" not in sys.modules


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_bundle_holds_the_shim_and_an_import():
    """And is the same whenever it is made: sites know it by its SHA-256."""
    made = flower_bundle.bundle()
    with zipfile.ZipFile(BytesIO(made.content)) as files:
        client = files.read("crossfed_run/client.py")
        assert client == Path(flower_app_shim.__file__).read_bytes()
        assert files.read("crossfed_run/server.py").startswith(b"from deploy.")
        python = [name for name in files.namelist() if name.endswith(".py")]
        kinds = {info.compress_type for info in files.infolist()}
    assert len(python) == 3
    # What a compressor makes of the same text depends on its version.
    assert kinds == {zipfile.ZIP_STORED}
    flower_bundle.bundle.cache_clear()
    assert flower_bundle.bundle() == made


OLDER = """
import numpy as np
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

class Client(NumPyClient):
    def __init__(self, part):
        self.part = part

    def fit(self, parameters, config):
        arrays = [array + config["lr"] * self.part for array in parameters]
        return arrays, 8, {"train_loss": 1.5, "device": "cpu"}

    def evaluate(self, parameters, config):
        return 0.25, 4, {"accuracy": 0.75}

def client_fn(context):
    return Client(context.node_config["partition-id"]).to_client()

app = ClientApp(client_fn=client_fn)
"""


@pytest.mark.parametrize("kind", ["train", "evaluate"])
def test_client_fn_answers_as_newer_apps_do(folder: Path, kind: str):
    """With the records that ``flower_records`` sends and reads."""
    (folder / "small" / "client.py").write_text(OLDER)
    weights = ArrayRecord({"w": Array(np.ones(2, dtype=np.float32))})
    content = RecordDict({"arrays": weights, "config": ConfigRecord({"lr": 0.5})})
    node = {"app": str(folder), "partition-id": 3, "num-partitions": 4}
    found = call(content, kind, **node).content
    if kind == "train":
        (array,) = found["arrays"].to_numpy_ndarrays()
        np.testing.assert_array_equal(array, [2.5, 2.5])
        assert dict(found["metrics"]) == {"num-examples": 8, "train_loss": 1.5}
    else:
        told = {"num-examples": 4, "eval_loss": 0.25, "accuracy": 0.75}
        assert dict(found["metrics"]) == told
