"""Adapt models for per-record gradients, or refuse them with a reason.

What a layer computes for one record must depend on that record alone, and nothing
but the noised gradient may change what the site sends. Layers whose rule breaks
this are replaced where Opacus has a replacement; the rest is refused by name.

What a module of a user's own does in its forward pass is not seen here: ``probe`` tests
it before the first private step.
"""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from federation.errors import JobError
from privacy.dp_sgd.attention import RecordAttention
from privacy.dp_sgd.layers import known_type, opacus, trainable, trained_layers

_KEY = "model.factory"


def fit_for_privacy(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Replace or refuse what DP-SGD cannot train.

    Batch normalisation becomes group normalisation; ``nn.MultiheadAttention``,
    ``nn.LSTM`` and ``nn.GRU`` become layers of the same function. A normalisation
    begins anew, all others keep their weights and the names of these. A group
    normalisation has no buffers, so this belongs before any layout is taken.

    Args:
        module: A model; changed in place.

    Returns:
        The model, another object only if it was itself one such layer; and what was
        replaced, for example ``features.1: BatchNorm2d by GroupNorm``.

    Raises:
        JobError: A layer has no replacement; the message names it and says what to
            use instead.
    """
    replaced = []
    for name, layer in list(module.named_modules()):
        _check_record_axis(name, layer)
        if isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False  # Only torch's own attention reads them.
        fixed = _fixed(layer)
        if fixed is layer:
            continue
        _keep_frozen(layer, fixed)
        module = _put(module, name, fixed)
        kinds = f"{type(layer).__name__} by {type(fixed).__name__}"
        replaced.append(f"{name or 'the model'}: {kinds}")
    for name, layer in module.named_modules():
        _check_layer(name, layer)
    for name, layer in trained_layers(module).items():
        _check_trained(name, layer)
    return module, replaced


def without_batch_norm(module: nn.Module) -> tuple[nn.Module, list[str]]:
    """Replace only batch normalisation, whose statistics would need noise too.

    Args:
        module: A model; changed in place.

    Returns:
        As ``fit_for_privacy``.
    """
    replaced = []
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _BatchNorm):
            fixed = _fixed(layer)
            _keep_frozen(layer, fixed)
            module = _put(module, name, fixed)
            _check_layer(name, fixed)
            kinds = f"{type(layer).__name__} by {type(fixed).__name__}"
            replaced.append(f"{name or 'the model'}: {kinds}")
    return module, replaced


def _fixed(layer: nn.Module) -> nn.Module:
    """Return a layer's replacement, or the layer itself."""
    if type(layer) is nn.MultiheadAttention:
        plain = layer.bias_k is None and not layer.add_zero_attn
        return RecordAttention(layer) if plain else layer
    fixer = opacus().fixers.get(type(layer))
    fixed = layer if fixer is None else fixer(layer)
    return _grouped(fixed) if isinstance(layer, _BatchNorm) else fixed


def _grouped(layer: nn.Module) -> nn.Module:
    """Give a group at least two channels.

    Opacus gives up to 32 channels a group each. Without places, as after a linear
    layer, such a group is one value: its norm is always 0, and torch refuses a sample
    of one record.
    """
    if not isinstance(layer, nn.GroupNorm) or layer.num_groups < layer.num_channels:
        return layer
    channels = layer.num_channels
    most = max(1, channels // 2)
    groups = max(g for g in range(1, most + 1) if channels % g == 0)
    return nn.GroupNorm(groups, channels, eps=layer.eps, affine=layer.affine)


def _put(module: nn.Module, name: str, layer: nn.Module) -> nn.Module:
    if not name:
        return layer
    parent, _, child = name.rpartition(".")
    module.get_submodule(parent)._modules[child] = layer  # noqa: SLF001 - also in lists.
    return module


def _keep_frozen(before: nn.Module, after: nn.Module) -> None:
    parameters = list(before.parameters())
    if parameters:
        after.to(parameters[0].device)
        if not any(parameter.requires_grad for parameter in parameters):
            after.requires_grad_(requires_grad=False)


def _refuse(name: str, layer: nn.Module, why: str, instead: str) -> JobError:
    return JobError(
        f"{name or 'the model'!r} is a {type(layer).__name__}, which {why}: {instead}",
        key=_KEY,
    )


def _check_record_axis(name: str, layer: nn.Module) -> None:
    recurrent_or_attention = isinstance(layer, (nn.RNNBase, nn.MultiheadAttention))
    if recurrent_or_attention and not layer.batch_first:
        raise _refuse(
            name,
            layer,
            "does not have the records on its first axis",
            "use batch_first=True",
        )


def _check_layer(name: str, layer: nn.Module) -> None:
    """Refuse what mixes records, or changes weights without noise."""
    if isinstance(layer, _BatchNorm):
        why = "makes a record's result depend on the others in its batch"
        raise _refuse(name, layer, why, "use nn.GroupNorm, or nn.LayerNorm")
    if isinstance(layer, nn.RNNBase):
        why = "has no gradients by record"
        raise _refuse(name, layer, why, "use nn.LSTM or nn.GRU, or train without it")
    if isinstance(layer, nn.MultiheadAttention):
        why = "has no gradients by record"
        instead = "remove add_bias_kv and add_zero_attn, and do not subclass it"
        raise _refuse(name, layer, why, instead)
    if isinstance(layer, nn.Embedding) and layer.max_norm is not None:
        why = "changes its weights when it reads them (max_norm)"
        raise _refuse(name, layer, why, "remove max_norm")
    if isinstance(layer, nn.EmbeddingBag):
        why = "has no gradients by record"
        raise _refuse(name, layer, why, "use nn.Embedding and take the mean")


def _check_trained(name: str, layer: nn.Module) -> None:
    """Refuse layers for whose parameters there are no per-record gradients."""
    if getattr(layer, "scale_grad_by_freq", False):
        why = "divides a gradient by how often a token is in the whole batch "
        instead = "remove scale_grad_by_freq"
        raise _refuse(name, layer, f"{why}(scale_grad_by_freq)", instead)
    if known_type(layer) is not None:
        if not set(trainable(layer)) <= {"weight", "bias"}:
            why = "stores its weights in another form (weight_norm, spectral_norm)"
            raise _refuse(name, layer, why, "use the layer as it is")
        return
    if isinstance(layer, nn.LayerNorm):
        return
    for inner in layer.modules():
        if isinstance(inner, _DropoutNd) and inner.p > 0:
            why = "has parameters of its own and draws random numbers"
            instead = "move its parameters into layers like nn.Linear"
            raise _refuse(name, layer, why, instead)
    try:
        opacus().prepare(layer)
        del layer.ft_compute_sample_grad
    except (NotImplementedError, RuntimeError) as error:
        why = "has no gradients by record"
        instead = "build it from layers like nn.Linear, without buffers"
        raise _refuse(name, layer, why, instead) from error
