"""A run's model in ONNX: exact, with int8 operators, or with 4-bit weights.

``int8``: ONNX Runtime's dynamic quantisation, weights in 8 bits and activations
quantised as they come. ``int4``: weights of matrix products in 4 bits, in blocks of 32
with a scale each, activations in float32.
"""

import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from clients.models.applying import apply_model
from cloud_adapters.extras import naming_extras
from deploy.tools.parity import outputs_of
from federation.errors import JobError
from federation.job.metrics import ENTROPIES
from federation.tree import Tree, leaves, map_tree

FILE = "model.onnx"
BLOCK = 32
_TOKEN_AXES = 2
_OF_LOGITS = ENTROPIES - {"contrastive", "ranking"}


class Flat(torch.nn.Module):
    """A model whose inputs and outputs are tensors in a row, as ONNX has them."""

    def __init__(self, model: torch.nn.Module, inputs: Tree) -> None:
        """Wrap a model that takes inputs like these."""
        super().__init__()
        self._model = model
        self._like = inputs

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Apply the model to inputs in the order of ``leaves``."""
        rest = iter(tensors)
        return tuple(
            outputs_of(self._model, map_tree(lambda _: next(rest), self._like))
        )


def input_names(inputs: Tree) -> Sequence[str]:
    """Name a model's inputs in ONNX: as in a dict, else ``input_0`` and so on."""
    if isinstance(inputs, torch.Tensor):
        return ["input"]
    if isinstance(inputs, Mapping) and not any(
        isinstance(part, Mapping | tuple | list) for part in inputs.values()
    ):
        return [str(name) for name, part in inputs.items() if part is not None]
    return [f"input_{index}" for index, _ in enumerate(leaves(inputs))]


def output_names(model: torch.nn.Module, inputs: Tree, task: str) -> Sequence[str]:
    """Name a model's outputs in ONNX: as in a dict, else ``logits`` or ``output``."""
    with torch.no_grad():
        found = apply_model(model, inputs)
    if isinstance(found, Mapping):
        # As ``outputs_of`` takes them; the names of a graph are unique.
        tensors = [n for n, part in found.items() if isinstance(part, torch.Tensor)]
        names = ["logits"] if "logits" in found else tensors
        taken = input_names(inputs)
        return [f"output_{n}" if n in taken else str(n) for n in names]
    outputs = outputs_of(model, inputs)
    if len(outputs) > 1:
        return [f"output_{index}" for index, _ in enumerate(outputs)]
    return ["logits" if task in _OF_LOGITS else "output"]


def write_onnx(
    model: torch.nn.Module, inputs: Tree, folder: Path, *, task: str, kind: str
) -> Path:
    """Write a model for any number of records.

    Args:
        model: On the CPU, for evaluation.
        inputs: Of two records or more; only types and shapes matter. The first axis,
            and that of the places of tokens, can have another length later.
        folder: Where to.
        task: The job's, which says what the model returns.
        kind: ``exact``, ``int8`` or ``int4``.

    Returns:
        The file.

    Raises:
        MissingExtra: onnx, onnxscript or onnxruntime is not installed.
        JobError: The model has an operation that ONNX lacks, or nothing to quantise.
    """
    with naming_extras():
        import onnx  # noqa: PLC0415 -- extras
        import onnxruntime  # noqa: F401, PLC0415
        import onnxscript  # noqa: F401, PLC0415
    tensors = tuple(leaves(inputs))
    outputs = output_names(model.eval(), inputs, task)
    flat = Flat(model, inputs).eval()
    found = _exported(flat, tensors, input_names(inputs), outputs)
    # Traces of the export name folders of this machine.
    _strip_(found.graph)
    for function in found.functions:
        _strip_(function)
    path = folder / FILE
    if kind == "exact":
        _save(onnx, found, path)
        return path
    with tempfile.TemporaryDirectory(prefix="crossfed-onnx-") as scratch:
        exact = Path(scratch) / FILE
        _save(onnx, found, exact)
        if kind == "int8":
            _to_int8(exact, path)
        else:
            _to_int4(onnx, exact, path)
    return path


def run_onnx(path: Path, inputs: Tree) -> Sequence[Any]:
    """Outputs of a file for some records, by ONNX Runtime on the CPU."""
    with naming_extras():
        import onnxruntime  # noqa: PLC0415 -- an extra
    session = onnxruntime.InferenceSession(
        str(path), providers=["CPUExecutionProvider"]
    )
    arrays = [part.detach().cpu().numpy() for part in leaves(inputs)]
    taken = {one.name for one in session.get_inputs()}
    named = dict(zip(input_names(inputs), arrays, strict=True))
    # The export drops inputs on which no output depends.
    return list(session.run(None, {n: a for n, a in named.items() if n in taken}))


def _exported(
    flat: Flat,
    tensors: tuple[torch.Tensor, ...],
    names: Sequence[str],
    outputs: Sequence[str],
) -> Any:
    any_length = torch.export.Dim.DYNAMIC
    shapes = tuple(
        {0: any_length} | ({1: torch.export.Dim.AUTO} if _is_tokens(part) else {})
        for part in tensors
    )
    try:
        with _quiet():
            program = torch.onnx.export(
                flat,
                tensors,
                dynamo=True,
                input_names=list(names),
                output_names=list(outputs),
                dynamic_shapes=(shapes,),
                verbose=False,
            )
    except torch.onnx.errors.OnnxExporterError as error:
        first = str(error.__cause__ or error).strip().partition("\n")[0]
        raise JobError(
            f"ONNX cannot express this model: {first:.300}; export another format",
            key="--format",
        ) from error
    assert program is not None  # noqa: S101 -- without a file name it is returned
    return program.model_proto


def _is_tokens(part: torch.Tensor) -> bool:
    return part.ndim >= _TOKEN_AXES and not part.is_floating_point()


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the exporter's notes on itself and on packages that are not needed."""
    loggers = [logging.getLogger(n) for n in ("torch.onnx", "onnxscript", "onnx_ir")]
    before = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        for one, level in zip(loggers, before, strict=True):
            one.setLevel(level)


def _strip_(graph: Any) -> None:
    for part in (*graph.node, *graph.value_info, *getattr(graph, "initializer", ())):
        part.doc_string = ""
        del part.metadata_props[:]
        for attribute in getattr(part, "attribute", ()):
            if attribute.HasField("g"):
                _strip_(attribute.g)
    graph.doc_string = ""
    del graph.metadata_props[:]


def _save(onnx: Any, model: Any, path: Path) -> None:
    # Protocol buffers end at 2 GiB: a larger model has its values in a file beside.
    large = model.ByteSize() > 1 << 30
    onnx.save(model, str(path), save_as_external_data=large, location=f"{FILE}.data")


def _to_int8(exact: Path, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic  # noqa: PLC0415

    logging.getLogger().addFilter(_no_advice)
    try:
        quantize_dynamic(str(exact), str(path), weight_type=QuantType.QInt8)
    finally:
        logging.getLogger().removeFilter(_no_advice)


def _no_advice(record: logging.LogRecord) -> bool:
    return "pre-processing before quantization" not in record.getMessage()


def _to_int4(onnx: Any, exact: Path, path: Path) -> None:
    from onnxruntime.quantization.matmul_nbits_quantizer import (  # noqa: PLC0415
        MatMulNBitsQuantizer,
    )
    from onnxruntime.quantization.onnx_model import ONNXModel  # noqa: PLC0415

    model = ONNXModel(onnx.load(str(exact)))
    model.replace_gemm_with_matmul()
    quantizer = MatMulNBitsQuantizer(
        model.model, bits=4, block_size=BLOCK, is_symmetric=True
    )
    quantizer.process()
    if not any(n.op_type == "MatMulNBits" for n in quantizer.model.model.graph.node):
        raise JobError(
            "this model has no matrix product whose weights could have 4 bits: use "
            "onnx-int8",
            key="--format",
        )
    _save(onnx, quantizer.model.model, path)
