"""Models of Hugging Face's transformers, by configuration or from a local folder.

Nothing is downloaded and no code of a folder is run: a name of the hub is refused, and
so are a configuration with an ``auto_map`` or a kernel of the hub, and weights that are
not safetensors.
"""

import difflib
import hashlib
import inspect
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from clients.factories import check_options
from clients.models.adapters import with_lora, with_prompt
from clients.models.tokenizers import note_tokenizer
from federation.errors import JobError, MissingExtra, os_errors

_KEY = "model.options"
# What tokenisers of transformers read: vocabularies have many names, such as spm.model,
# bpe.codes and tokenizer.4.0.0.json. config.json may name the class.
_TOKENIZER_ENDS = (
    ".codes",
    ".jinja",
    ".json",
    ".model",
    ".spm",
    ".tiktoken",
    ".tokenizer",
    ".txt",
)
_TEMPLATES = "additional_chat_templates"
_INDEX = ".safetensors.index.json"
_DAMAGED = (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError)
_MODEL_ENDS = (".safetensors", _INDEX)
_MODEL_FILES = frozenset({"config.json", "adapter_config.json"})
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def hugging_face(
    auto: str = "AutoModelForCausalLM",
    config: Mapping[str, Any] | None = None,
    folder: str | None = None,
    sha256: str | None = None,
    *,
    dtype: str = "float32",
    gradient_checkpointing: bool = False,
    lora: Mapping[str, Any] | None = None,
    prompt: Mapping[str, Any] | None = None,
) -> torch.nn.Module:
    """Build a model of transformers.

    Args:
        auto: Class of transformers, such as ``AutoModelForSequenceClassification``.
        config: Configuration of a new model, whose weights are drawn with the job's
            seed: ``model_type`` and what the class of that type takes.
        folder: In place of ``config``: a folder with ``config.json`` and weights as
            safetensors.
        sha256: Digest of the files of ``folder``; needed with it. It is part of the
            job, so that each site has the same files.
        dtype: Type of the parameters: ``float32`` or ``bfloat16``.
        gradient_checkpointing: Compute activations again in the backward pass.
        lora: Train only low-rank adapters, by peft: ``rank``, ``alpha``, ``targets``
            (names of layers), ``train`` (names of layers that are trained as they
            are, such as a new head), ``dropout``, ``dora`` and ``method``, see
            ``with_lora``.
        prompt: Train only a prompt, by peft: ``tokens``, see ``with_prompt``.

    Raises:
        JobError: An option does not fit, or the folder is not what the job names.
        MissingExtra: transformers or peft is not installed.
    """
    transformers = _transformers()
    kind = getattr(transformers, auto, None)
    if not auto.startswith("AutoModel") or kind is None:
        raise JobError(
            f"{auto!r:.80} is not an AutoModel class of transformers",
            key=f"{_KEY}.auto",
        )
    if dtype not in _DTYPES:
        raise JobError(f"use one of {', '.join(_DTYPES)}", key=f"{_KEY}.dtype")
    _check_one(config=config, folder=folder)
    if lora is not None and prompt is not None:
        raise JobError("give either lora or prompt", key=_KEY)
    model = _made(kind, config, folder, sha256)
    model.config.use_cache = False
    model.to(_DTYPES[dtype])
    if gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
        if lora is not None or prompt is not None:
            model.enable_input_require_grads()
    for name, options, adapt in (
        ("lora", lora, with_lora),
        ("prompt", prompt, with_prompt),
    ):
        if options is not None:
            check_options(partial(adapt, model), options, key=f"{_KEY}.{name}")
            model = adapt(model, **options)
    return model  # type: ignore[no-any-return]


def _made(
    kind: Any, config: Mapping[str, Any] | None, folder: str | None, sha256: str | None
) -> Any:
    """Make a model from its configuration or its folder."""
    if folder is None:
        made = _config(_transformers(), dict(config or {}))
        return kind.from_config(made, trust_remote_code=False)
    path = checked_folder(folder, sha256, key=_KEY, tokenizer=False)
    return _from_folder(kind, path)


def _check_one(**options: object) -> None:
    """Refuse more or less than one of several options.

    Raises:
        JobError: There are more, or none.
    """
    if sum(value is not None for value in options.values()) != 1:
        raise JobError(f"give either {' or '.join(options)}", key=_KEY)


def tokenizer(folder: str, sha256: str | None = None) -> Any:
    """Load a tokeniser of transformers, for a data source.

    Pass both from the source's options. Name the digest in ``model.tokenizers`` of the
    job too: then a site whose source loads another one refuses the job.

    Args:
        folder: Where ``save_pretrained`` wrote it.
        sha256: Digest of its files.

    Returns:
        A ``transformers.PreTrainedTokenizerBase``.

    Raises:
        JobError: The folder is not what the job names; the message has its digest.
        MissingExtra: transformers is not installed.
    """
    path = checked_folder(folder, sha256, key="data.options", tokenizer=True)
    note_tokenizer(sha256 or "")
    transformers = _transformers()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(path), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Its readers, some of them in Rust, raise anything. This does not continue.
        raise JobError(
            f"transformers cannot read the tokeniser in {path}: {error!r:.400}; copy "
            "its files again",
            key="data.options.folder",
            outside="transformers cannot read the tokeniser",
        ) from error


def checked_folder(
    folder: str, sha256: str | None, *, key: str, tokenizer: bool
) -> Path:
    """Check that a folder holds the files that the job names.

    Args:
        folder: Folder of a model or a tokeniser.
        sha256: What ``folder_digest`` returned for the author of the job.
        key: Table of the job file with both.
        tokenizer: Whether only the tokeniser's files count.

    Raises:
        JobError: There is no such folder, or its digest is another.
    """
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise JobError(
            f"there is no folder {folder!r}: models and tokenisers are read from local "
            "folders and never downloaded",
            key=f"{key}.folder",
            outside="there is no such folder",
        )
    found = folder_digest(path, tokenizer=tokenizer)
    if sha256 != found:
        said = "is missing" if sha256 is None else f"is {sha256!r:.80}"
        what = "tokeniser" if tokenizer else "model"
        raise JobError(
            f"{said}, and the digest of the {what} in {folder} is {found}: use the "
            "same files at all sites, or write this digest into the job",
            key=f"{key}.sha256",
            outside=f"the {what}'s files here differ from those that the job names",
        )
    return path


def folder_digest(path: Path, *, tokenizer: bool) -> str:
    """SHA-256 over names and contents of a model's or a tokeniser's files.

    Raises:
        JobError: A file cannot be read, or there is none.
    """
    with os_errors(JobError, f"read {path}"):
        found = [*path.iterdir(), *(path / _TEMPLATES).glob("*")]
        names = sorted(
            each.relative_to(path).as_posix()
            for each in found
            if each.is_file() and (tokenizer or each.parent == path)
        )
    if tokenizer:
        names = [n for n in names if n.endswith(_TOKENIZER_ENDS)]
        names = [n for n in names if not n.endswith(_INDEX)]
    else:
        names = [n for n in names if n in _MODEL_FILES or n.endswith(_MODEL_ENDS)]
    if not names:
        what = "tokeniser" if tokenizer else "config.json and no safetensors"
        raise JobError(f"{path} holds no {what}", outside=f"it holds no {what}")
    whole = hashlib.sha256()
    for name in names:
        with os_errors(JobError, f"read {path / name}"), (path / name).open("rb") as f:
            part = hashlib.file_digest(f, "sha256").digest()
        whole.update(hashlib.sha256(name.encode()).digest() + part)
    return whole.hexdigest()


def _transformers() -> Any:
    # Before the import, which reads them. A site trains without the network, and with
    # no native code of the hub, which the package kernels would load.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        os.environ[name] = "1"
    os.environ["USE_HUB_KERNELS"] = "0"
    try:
        import transformers  # noqa: PLC0415 -- an extra, which takes seconds to import
    except ImportError as error:
        raise MissingExtra("transformers", "huggingface") from error
    return transformers


def _config(transformers: Any, options: dict[str, Any]) -> Any:
    key = f"{_KEY}.config"
    kind = options.pop("model_type", None)
    if kind is None:
        raise JobError("is missing, for example gpt2 or bert", key=f"{key}.model_type")
    _refuse_remote_code(options)
    try:
        made = transformers.AutoConfig.for_model(kind, **options)
    except (TypeError, ValueError) as error:
        raise JobError(f"transformers refuses it: {error}", key=key) from error
    refuse_misspelt(type(made), options, key=key)
    return made


def refuse_misspelt(kind: type[Any], options: Mapping[str, Any], *, key: str) -> None:
    """Refuse a name that differs little from an argument, such as ``n_layers``.

    transformers takes any name and ignores those that it does not know. Other unknown
    names pass, since models also read some that no class declares.

    Args:
        kind: Class of the configuration.
        options: Arguments that the job gives it, and that it takes.
        key: Key of the job that holds them.

    Raises:
        JobError: A name would have no effect, and a similar one exists.
    """
    known = set(getattr(kind, "attribute_map", ()))
    for parent in kind.__mro__:
        if init := vars(parent).get("__init__"):
            known.update(inspect.signature(init).parameters)
    for name in options:
        if name in known or hasattr(kind, name) or name.endswith("_token_id"):
            continue
        # No model reads it, or it is very near: a name that another model has.
        cutoff = 0.85 if _is_read(kind, name) else 0.5
        near = difflib.get_close_matches(name, known, n=1, cutoff=cutoff)
        others = {other: options[other] for other in options if other != name}
        # Some attributes are computed, and all are in a config.json.
        if near and not hasattr(kind(**others), name):
            raise JobError(
                f"{kind.__name__} has no {name!r}, which would have no effect; did you "
                f"mean {near[0]!r}?",
                key=f"{key}.{name}",
            )


def _is_read(kind: type[Any], name: str) -> bool:
    """Whether the code of a configuration's models, or what all share, has a name."""
    folder = Path(inspect.getfile(kind)).parent
    shared = folder.parents[1].glob("*_utils.py")
    files = [*folder.glob("*.py"), *(f for f in shared if "gguf" not in f.name)]
    word = re.compile(rf"\b{re.escape(name)}\b")
    return any(word.search(file.read_text("utf-8")) for file in files)


def _from_folder(kind: Any, path: Path) -> Any:
    transformers = _transformers()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(
            str(path), local_files_only=True
        )
        _refuse_remote_code(config)
        _refuse_other_files(path, config)
        with _quiet(transformers):
            model, found = kind.from_pretrained(
                str(path),
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # They are refused below, by name.
                output_loading_info=True,
                **local,
            )
    # Files of another form are found by what their readers do with them.
    except (*_DAMAGED, SafetensorError) as error:
        raise JobError(
            f"transformers cannot read {path}: {error!r:.400}; copy its files again",
            key=f"{_KEY}.folder",
            outside="transformers cannot read it",
        ) from error
    if fault := _misfit(model, found):
        fault = f"its weights are those of another model than its config.json: {fault}"
        raise JobError(f"{path}: {fault}", key=f"{_KEY}.folder", outside=fault)
    return model


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Show no progress bar and no report of new heads: ``_misfit`` checks the rest.

    Every site of a simulation may load the folder several times.
    """
    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _misfit(model: Any, found: Mapping[str, Any]) -> str:
    """Name the first layer that a file of weights does not have; empty for none.

    A new head is no misfit, nor is the pooler of a model that was trained without one.
    """
    for name, theirs, ours in sorted(found["mismatched_keys"]):
        return f"{name!r} is {list(ours)} in the model and {list(theirs)} in the file"
    body = f"{model.base_model_prefix}."
    for name in model.state_dict():
        is_body = name.startswith(body) and ".pooler." not in name
        if is_body and name in found["missing_keys"]:
            return f"the file has no {name!r}"
    return ""


def _refuse_other_files(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse weights that are not among the files of the digest."""
    named = {config.get("transformers_weights") or "model.safetensors"}
    for index in path.glob(f"*{_INDEX}"):
        named |= set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    for name in map(str, named):
        if Path(name).name != name or not name.endswith(_MODEL_ENDS):
            raise JobError(
                f"{path} names weights in {name!r:.80}, but only safetensors in the "
                "folder itself are read: move the file there and change its name in "
                f"config.json or *{_INDEX}",
                key=f"{_KEY}.folder",
                outside="it names weights that are no safetensors in the folder itself",
            )


def _refuse_remote_code(config: Mapping[str, Any]) -> None:
    # With attribute_map a key of any name becomes auto_map, or an implementation.
    for name in config.keys() & {"auto_map", "attribute_map"}:
        raise JobError(
            f"the configuration has {name}, which may name Python code of its own: "
            "that is never run; use a class of transformers, or a factory of your own",
            key=_KEY,
        )
    for name, value in config.items():
        # The form owner/repository is a kernel of the hub: native code. Parts of a
        # model may have one each.
        if "_implementation" in name and "/" in str(value):
            raise JobError(
                f"{name} names code of the hub, which is never run: use eager or sdpa",
                key=_KEY,
            )
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, Mapping):
                _refuse_remote_code(inner)
