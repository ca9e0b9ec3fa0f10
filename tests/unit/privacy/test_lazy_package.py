"""Parts of a package are there before the package itself."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from privacy.dp_sgd.lazy_package import defer

ROOT = Path(__file__).resolve().parents[3]
NAME = "package_that_is_deferred"
INIT = """
import os

if "FAILS" in os.environ:
    raise RuntimeError("out of order")
from .part import value
from . import other
__version__ = "3"
runs = [value]
"""
CHEAP = """
import sys
import torch
from privacy.dp_sgd.convolution import Workspace
from privacy.dp_sgd.layers import opacus, record_gradients

opacus()
assert not {"scipy.stats", "sympy", "torch._dynamo"} & {*sys.modules}
rows = torch.randn(3, 2, 4)
cubes, places = torch.randn(3, 2, 4, 4, 4), torch.ones(3, 2, dtype=torch.long)
for layer, inputs in (
    (torch.nn.Linear(4, 2), rows),
    (torch.nn.LayerNorm(4), rows),
    (torch.nn.GroupNorm(2, 2), rows),
    (torch.nn.InstanceNorm1d(2, affine=True), rows),
    (torch.nn.RMSNorm(4), rows),
    (torch.nn.Embedding(4, 2), places),
    (torch.nn.Conv1d(2, 2, 2), rows),
    (torch.nn.Conv3d(2, 2, 2), cubes),
    (torch.nn.PReLU(), rows),  # By torch.func, which imports much.
):
    backprops = torch.ones_like(layer(inputs))
    found = record_gradients(layer, inputs, backprops, Workspace())
    assert {*found} == {*layer.parameters()}, layer
assert "opacus.privacy_engine" not in sys.modules
import opacus.utils

assert opacus.PrivacyEngine.__module__ == "opacus.privacy_engine"
assert opacus.grad_sample.GradSampleModule is opacus.GradSampleModule
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """One that has two modules, deferred."""
    (tmp_path / NAME).mkdir()
    files = {"__init__": INIT, "part": "value = 7\n", "other": "value = 8\n"}
    for name, text in files.items():
        (tmp_path / NAME / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    defer(NAME)
    yield sys.modules[NAME]
    for name in [name for name in sys.modules if name.partition(".")[0] == NAME]:
        del sys.modules[name]


def test_a_part_is_imported_alone(package: ModuleType):
    assert importlib.import_module(f"{NAME}.part").value == 7
    assert f"{NAME}.other" not in sys.modules
    assert "runs" not in vars(package)


def test_the_rest_comes_when_it_is_asked_for(package: ModuleType):
    """And what was imported before is still the same."""
    part = importlib.import_module(f"{NAME}.part")
    assert importlib.import_module(NAME).runs == [7]
    assert package.other.value == 8
    assert package.part is part
    assert not hasattr(package, "nothing")


def test_a_version_is_asked_for_and_other_internals_are_not(package: ModuleType):
    """Tools look at all modules for attributes that few of them have."""
    assert not hasattr(package, "__wrapped__")
    assert "runs" not in vars(package)
    assert package.__version__ == "3"


def test_an_error_is_that_of_each_who_asks(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAILS", "1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of order"):
            _ = package.runs
    monkeypatch.delenv("FAILS")
    assert package.runs == [7]


def test_a_package_that_is_there_does_not_change(package: ModuleType):
    _ = package.runs
    defer(NAME)
    assert sys.modules[NAME] is package
    assert package.runs == [7]


def test_a_package_that_is_not_there_is_not_made():
    defer("no_such_package")
    assert "no_such_package" not in sys.modules


@pytest.mark.slow
@pytest.mark.long
def test_private_training_imports_few_parts_of_opacus():
    """Without statistics, symbols and the compiler; a user's import has everything."""
    command = [sys.executable, "-c", CHEAP]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
