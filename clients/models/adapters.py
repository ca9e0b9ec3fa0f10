"""Adapters of peft: the values of a model that are trained, and their average."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from federation.errors import JobError, MissingExtra, SiteError
from federation.job.adapters import Factors

_KEY = "model.options"
_AXES = 2  # Of the factors of a linear layer.
_ALL = "all-linear"  # What peft calls all linear layers but the head.
_METHODS = ("ffa", "plain", "fedex", "svd")
# Classes of transformers by the end of their names, and what peft calls their task.
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
}


def with_lora(
    model: torch.nn.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: list[str] | str = _ALL,
    train: list[str] | None = None,
    dropout: float = 0.0,
    dora: bool = False,
    method: str = "ffa",
) -> torch.nn.Module:
    """Put low-rank adapters ``B A`` beside layers of a model, and freeze all else.

    The mean of the sites' products is the product of their means only if one factor is
    the same everywhere. With ``ffa`` that is A, drawn with the job's seed and frozen:
    sums are exact (Sun et al. 2024, arXiv:2403.12313, FFA-LoRA). ``plain`` trains and
    averages both, which is not exact. ``fedex`` does so, too, and the aggregator adds
    what is missing to the weights beside the adapters, which then travel down with the
    model (Singhal et al. 2024, arXiv:2410.09432, FedEx-LoRA). With ``svd``, it makes
    new factors of the mean of products, cut to the rank (Bai et al. 2024,
    arXiv:2402.11505, FlexLoRA).

    Args:
        model: A model of transformers, or any that peft takes.
        rank: Rank of the adapters.
        alpha: Numerator of their scale ``alpha / rank``; twice the rank by default.
        targets: Names of layers, or one of them; ``all-linear`` for all but the head.
        train: Names of layers that are trained as they are.
        dropout: Share of the adapters' inputs that is set to zero in training.
        dora: Train the magnitude of the weights as well (arXiv:2402.09353); ``plain``
            only.
        method: ``ffa``, ``plain``, ``fedex`` or ``svd``.

    Raises:
        JobError: An option does not fit, or no layer has such a name.
        MissingExtra: peft is not installed.
    """
    key = f"{_KEY}.lora"
    _check_method(method, dora=dora)
    _check_layers(model, train or (), key=f"{key}.train")
    if targets != _ALL:
        # As a list: peft searches every layer's name for the regular expression that
        # it takes a string for, and one that a job names may never end.
        targets = [targets] if isinstance(targets, str) else targets
        _check_layers(model, targets, key=f"{key}.targets")
    peft = _peft()
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        target_modules=targets,
        modules_to_save=train,
        lora_dropout=dropout,
        use_dora=dora,
        # GPT-2's layers, which store their matrices the other way round.
        fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
    )
    try:
        with _no_old_names():
            adapted = peft.get_peft_model(model, settings)
    except ValueError as error:
        raise JobError(f"peft refuses these adapters: {error}", key=key) from error
    if method == "ffa":
        for name, parameter in adapted.named_parameters():
            if ".lora_A." in name or ".lora_embedding_A." in name:
                parameter.requires_grad = False
    if method in {"fedex", "svd"}:
        adapted.exact_factors = tuple(_factors(adapted, refactored=method == "svd"))
    return adapted  # type: ignore[no-any-return]


def _check_method(method: str, *, dora: bool) -> None:
    """Refuse unknown ways of averaging, and DoRA where it would not be exact."""
    key = f"{_KEY}.lora"
    if method not in _METHODS:
        raise JobError(f"use one of {', '.join(_METHODS)}", key=f"{key}.method")
    if dora and method != "plain":
        raise JobError(
            "the norm of DoRA is not linear in B, so that sums would not be exact: set "
            'method = "plain", or remove this key',
            key=f"{key}.dora",
        )


def _factors(adapted: torch.nn.Module, *, refactored: bool) -> Iterator[Factors]:
    """Name the factors of all adapters of a model of peft."""
    for name, layer in adapted.named_modules():
        factors = getattr(layer, "lora_A", {}).values()
        is_linear = all(each.weight.ndim == _AXES for each in factors)
        if getattr(layer, "lora_embedding_A", None) or not is_linear:
            raise JobError(
                f"{name} is no linear layer, so its adapters cannot be averaged "
                'exactly: name linear layers, or set method = "plain"',
                key=f"{_KEY}.lora.targets",
            )
        for adapter in getattr(layer, "lora_A", ()):
            yield Factors(
                weight=f"{name}.base_layer.weight",
                a=f"{name}.lora_A.{adapter}.weight",
                b=f"{name}.lora_B.{adapter}.weight",
                scale=layer.scaling[adapter],
                transposed=bool(layer.fan_in_fan_out),
                refactored=refactored,
            )


def with_prompt(model: torch.nn.Module, *, tokens: int = 20) -> torch.nn.Module:
    """Put trained embeddings before the inputs of a frozen model.

    Prompt tuning (Lester et al. 2021, arXiv:2104.08691). The mean of the sites' prompts
    is a mean of embeddings, exact in any sum. A classifier's head is trained as well.

    Args:
        model: A language model or a sequence classifier of transformers.
        tokens: Length of the prompt.

    Returns:
        A module with the same logits ``(B, T, V)`` or ``(B, K)``: those of the prompt's
        own places are cut off.

    Raises:
        JobError: It is another kind of model, or there is no token.
        MissingExtra: peft is not installed.
    """
    key = f"{_KEY}.prompt"
    name = type(model).__name__
    task = next((task for end, task in _TASKS.items() if name.endswith(end)), None)
    if task is None:
        raise JobError(
            f"{name} takes no prompt: use AutoModelForCausalLM or "
            "AutoModelForSequenceClassification",
            key=key,
        )
    if tokens < 1:
        raise JobError("must be at least 1", key=f"{key}.tokens")
    peft = _peft()
    settings = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=tokens)
    with _no_old_names():
        adapted = peft.get_peft_model(model, settings)
    return prompted(adapted)


def prompted(adapted: torch.nn.Module) -> torch.nn.Module:
    """Cut the prompt's own places off the logits of a model of peft with a prompt."""
    settings: Any = adapted.active_peft_config
    is_decoder = settings.task_type == "CAUSAL_LM"
    return _PromptModel(adapted, cut=settings.num_virtual_tokens if is_decoder else 0)


def without_cut(model: torch.nn.Module) -> torch.nn.Module | None:
    """The model of peft inside what ``with_prompt`` returns; None for all others."""
    return model.adapted if isinstance(model, _PromptModel) else None


@contextmanager
def _no_old_names() -> Iterator[None]:
    """Hide that peft asks transformers by an old name, which no user can change."""
    with warnings.catch_warnings():
        old = ".*is_gradient_checkpointing"
        warnings.filterwarnings("ignore", old, category=FutureWarning)
        yield


class _PromptModel(torch.nn.Module):
    """A model with a prompt that returns logits of its inputs alone."""

    def __init__(self, adapted: torch.nn.Module, *, cut: int) -> None:
        super().__init__()
        self.adapted = adapted
        self._cut = cut
        # A decoder's head is called so, and reads the last place. Without a prompt,
        # transformers looks for the last one that is not padding.
        self._reads_last = not cut and hasattr(adapted.base_model, "score")

    def forward(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Logits ``(B, T, V)`` of tokens ``(B, T)``, or ``(B, K)``.

        Raises:
            SiteError: Records end with padding that would be classified, or are too
                long with the prompt.
        """
        mask = inputs.get("attention_mask")
        if self._reads_last and mask is not None and not bool(mask[:, -1].all()):
            raise SiteError(
                "with a prompt, this model classifies the last place of a record, "
                "which is padding here: pad on the left"
            )
        try:
            found = self.adapted(input_ids=input_ids, **inputs)
        except IndexError as error:
            fault = self._too_long(input_ids.shape[1])
            if fault is None:
                raise
            raise fault from error
        logits: torch.Tensor = found.logits
        return logits[:, self._cut :] if self._cut else logits

    def _too_long(self, places: int) -> SiteError | None:
        """Explain that records have no place left for the prompt, if so."""
        most = getattr(self.adapted.config, "max_position_embeddings", None)
        prompt: Any = self.adapted.active_peft_config
        tokens = prompt.num_virtual_tokens
        if most is None or places + tokens <= most:
            return None
        return SiteError(
            f"records and a prompt of {tokens} tokens are longer than the {most} "
            "places of the model: use shorter records, or fewer tokens in "
            f"{_KEY}.prompt"
        )


def _check_layers(model: torch.nn.Module, names: Sequence[str], *, key: str) -> None:
    """Refuse names of layers that the model does not have."""
    layers = [name for name, _ in model.named_modules() if name]
    for name in names:
        if any(layer == name or layer.endswith(f".{name}") for layer in layers):
            continue
        weighted = [
            layer.rpartition(".")[2]
            for layer, module in model.named_modules()
            if getattr(module, "weight", None) is not None
        ]
        raise JobError(
            f"there is no layer {name!r:.80}; layers with weights are "
            f"{', '.join(dict.fromkeys(weighted))}",
            key=key,
        )


def _peft() -> Any:
    try:
        import peft  # noqa: PLC0415 -- an extra, which takes seconds to import
    except ImportError as error:
        raise MissingExtra("peft", "huggingface") from error
    return peft
