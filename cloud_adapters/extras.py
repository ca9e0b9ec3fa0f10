"""Optional packages: which extra of crossfed installs each."""

from collections.abc import Iterator
from contextlib import contextmanager

from federation.errors import MissingExtra

_EXTRAS = {
    "accelerate": "huggingface",
    "boto3": "aws",
    "botocore": "aws",
    "cmaes": "tune",
    "flwr": "flower",
    "gguf": "gguf",
    "google": "gcp",
    "httpx": "flower",
    "peft": "huggingface",
    "transformers": "huggingface",
    "kubernetes": "kubernetes",
    "mlflow": "mlflow",
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "opentelemetry": "traces",
    "optuna": "tune",
    "pyarrow": "parquet",
    "ray": "flower",
    "requests": "gcp",
    "tensorboard": "tensorboard",
}


@contextmanager
def naming_extras() -> Iterator[None]:
    """Name the missing extra if an import of one of its packages fails.

    Raises:
        MissingExtra: A package is not installed that an extra installs.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        raise MissingExtra(error.name or package, _EXTRAS[package]) from error
