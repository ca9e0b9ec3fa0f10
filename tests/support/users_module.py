"""What a user might name in a job file: modules and data of their own."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


def two_moons(size: int = 80, noise: float = 0.1):
    """A data source that returns plain tuples of arrays."""
    rng = np.random.default_rng(5)
    angle = rng.uniform(0, np.pi, size)
    classes = np.arange(size) % 2
    x = np.where(classes, 1 - np.cos(angle), np.cos(angle))
    y = np.where(classes, 0.5 - np.sin(angle), np.sin(angle))
    points = np.stack([x, y], axis=1) + rng.normal(0, noise, (size, 2))
    cut = size * 3 // 4
    return (points[:cut], classes[:cut]), (points[cut:], classes[cut:])


class _Network(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2, width)
        self.outer = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


def network(width: int = 8) -> nn.Module:
    """A module from a class of the user's own."""
    return _Network(width)


class _Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + torch.randn_like(x))


def noisy_network() -> nn.Module:
    """A network that draws random numbers in evaluation, too."""
    return _Noisy()


def dropout_network(inputs: int = 4, classes: int = 3) -> nn.Module:
    """A network that draws random numbers while it trains."""
    return nn.Sequential(
        nn.Linear(inputs, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, classes)
    )


def norm_network(inputs: int = 4, classes: int = 3) -> nn.Module:
    """A network with running statistics and a counter."""
    return nn.Sequential(
        nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, classes)
    )


class _Noting(nn.Module):
    """Notes in its buffers, and in a frozen parameter, what it sees."""

    def __init__(self, *, in_frozen: bool) -> None:
        super().__init__()
        self.in_frozen = in_frozen
        self.linear = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().sum(0)
        self.calls += 1
        if self.in_frozen:
            self.frozen.data.copy_(x.detach().mean(0))
        return self.linear(x)


class _Recalling(nn.Module):
    """Adds to each batch what it has noted of those before, and notes its records."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.place = place
        if place == "frozen":
            self.notes = nn.Parameter(torch.zeros(4), requires_grad=False)
        elif place != "nowhere":
            self.register_buffer(
                "notes", torch.zeros(4), persistent=place == "persistent"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.place == "nowhere":
            return self.linear(x)
        logits = self.linear(x + self.notes)
        self.notes.data.copy_(x.detach().sum(0))
        return logits


def recalling_network(place: str) -> nn.Module:
    """A module whose later batches depend on the records of earlier ones."""
    return _Recalling(place)


def noting_network(*, in_frozen: bool = True) -> nn.Module:
    """A module that carries away what it sees by other ways than gradients."""
    return _Noting(in_frozen=in_frozen)


def frozen_network(inputs: int = 4, classes: int = 3) -> nn.Module:
    """A network whose first layer does not train."""
    model = nn.Sequential(nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, classes))
    model[0].requires_grad_(requires_grad=False)
    return model


two_moons.preprocessing = "none"  # type: ignore[attr-defined]


def own_means(size: int = 60):
    """Points less the mean of all of them."""
    (points, classes), held_out = two_moons(size)
    return (points - points.mean(0), classes), held_out


own_means.preprocessing = "own"  # type: ignore[attr-defined]


def undeclared(size: int = 60):
    """Points of which nobody says what was done to them."""
    return two_moons(size)


@cache
def same_network() -> nn.Module:
    """The very same module in every call."""
    return nn.Linear(4, 3)


_BACKBONE = nn.Linear(4, 4)


def shared_backbone() -> nn.Module:
    """A new module around a layer that all of them share."""
    return nn.Sequential(_BACKBONE, nn.Linear(4, 3))


class _SignOfSum(nn.Module):
    """Mixes the records of a batch, in training or in evaluation."""

    def __init__(self, *, training: bool) -> None:
        super().__init__()
        self.mixes_in_training = training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixes = self.training == self.mixes_in_training
        return x * torch.sign(x.sum()) if mixes else x


def mixing_network(*, training: bool = True) -> nn.Module:
    """A network in which no record is by itself."""
    return nn.Sequential(
        nn.Linear(4, 8), _SignOfSum(training=training), nn.Linear(8, 3)
    )


class _Forgetful(nn.Module):
    """Leaves everything behind that a forward pass can leave behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls = 0
        self.seen: list[float] = []
        self.register_buffer("scale", torch.ones(1), persistent=False)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x) * (self.scale + self.calls + len(self.seen))
        self.calls += 1
        self.seen.append(1.0)
        self.scale.add_(1)
        self.cache = x.detach().mean()
        self.left_over = logits
        self.register_forward_hook(lambda *_: None)
        return logits


def forgetful() -> nn.Module:
    """A module with state that is not in its ``state_dict``."""
    return _Forgetful()


class _LateDropout(nn.Module):
    """Draws random numbers only after some steps, as stochastic depth may."""

    def __init__(self, quiet: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.quiet = quiet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.steps += 1
            if self.steps > self.quiet:
                x = nn.functional.dropout(x, 0.5)
        return self.linear(x)


def late_dropout(quiet: int = 1) -> nn.Module:
    """A module that begins to draw in a later round."""
    return _LateDropout(quiet)


def leaves() -> None:
    """Ends the program."""
    raise SystemExit(0)


def two_parts(size: int = 96):
    """Records of two parts, and a target that depends on both: nested in a dict."""
    rng = np.random.default_rng(8)
    point, offset = rng.normal(size=(size, 3)), rng.normal(size=(size, 1))
    target = point @ [0.5, -0.3, 0.2] + 0.4 * offset[:, 0]
    cut = size * 3 // 4
    parts = [
        ({"point": point[rows], "more": (offset[rows],)}, target[rows])
        for rows in (slice(cut), slice(cut, None))
    ]
    return tuple(parts)


two_parts.preprocessing = "none"  # type: ignore[attr-defined]


class _TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Linear(3, 1)
        self.offset = nn.Linear(1, 1, bias=False)

    def forward(self, point: torch.Tensor, more: tuple[torch.Tensor]) -> torch.Tensor:
        return (self.point(point) + self.offset(more[0]))[:, 0]


def regression() -> nn.Module:
    """A linear model of two parts."""
    return _TwoParts()


def squared_error(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """An objective of the user's own, with a metric."""
    error = model(**inputs) - targets
    return {"loss": error.square(), "absolute_error": error.abs()}


def accuracy_within(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """An objective with an accuracy that is the user's: how often it is near."""
    error = model(**inputs) - targets
    return {"loss": error.square(), "accuracy": (error.abs() < 1).float()}


def error_to_the_mean(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """An objective that mixes records: each is held against all of its batch."""
    error = model(**inputs) - targets
    return {"loss": (error - error.mean()).square(), "absolute_error": error.abs()}


def gradient_of_others(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """Losses of single records, whose gradient depends on the others."""
    error = model(**inputs) - targets
    others = error.sum() - error.sum().detach()
    return {"loss": error.square() + others, "absolute_error": error.abs()}


def rank_of_error(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """A metric that mixes records: the place of each among its batch."""
    error = model(**inputs) - targets
    place = error.detach().abs().argsort().argsort() / len(error)
    return {"loss": error.square(), "absolute_error": place}


def mean_error(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """One number for the whole batch."""
    error = model(**inputs) - targets
    return {"loss": error.square().mean(), "absolute_error": error.abs()}


def detached(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """A loss that nothing can be learned from."""
    error = (model(**inputs) - targets).detach()
    return {"loss": error.square(), "absolute_error": error.abs()}


def wrong_name(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """A metric that no job names."""
    return {"loss": (model(**inputs) - targets).square(), "other": targets}


def broken(model: nn.Module, inputs: Any, targets: torch.Tensor):
    """A mistake of the user's own."""
    prediction = model(**inputs)
    return {"loss": prediction - targets.no_such_thing, "absolute_error": prediction}  # type: ignore[attr-defined]


class _Parts(nn.Module):
    def __init__(self, scale: float | None) -> None:
        super().__init__()
        self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = scale

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = self.used(inputs)
        return found if self.scale is None else found + self.scale * self.spare(inputs)


def with_spare_part(scale: float | None = None) -> nn.Module:
    """A model with a part that no record uses, unless it is scaled."""
    return _Parts(scale)


def with_logits(model: nn.Module, inputs: Any, targets: Any) -> dict[str, Any]:
    """Cross-entropy of one logit or of several, which measures are computed from."""
    logits = model(inputs)
    if logits.ndim == 1:
        found, said = functional.binary_cross_entropy_with_logits, logits > 0
    else:
        found, said = functional.cross_entropy, logits.argmax(1)
    loss = found(logits, targets, reduction="none")
    return {"loss": loss, "hit": (said == targets).float(), "logits": logits}


def without_logits(model: nn.Module, inputs: Any, targets: Any) -> dict[str, Any]:
    """Cross-entropy alone."""
    loss = functional.cross_entropy(model(inputs), targets, reduction="none")
    return {"loss": loss}


def logits_of_others(model: nn.Module, inputs: Any, targets: Any) -> dict[str, Any]:
    """A loss of each record alone, with logits that depend on the batch."""
    found = with_logits(model, inputs, targets)
    logits = found["logits"]
    return {"loss": found["loss"], "logits": logits - logits.mean(0)}


class Half(nn.Linear):
    """A layer whose parameters have 16 bits, of records with 4 values."""

    def __init__(self) -> None:
        """Give every value of a record a weight for each class."""
        super().__init__(4, 3, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute logits in 16 bits, and return them in 32."""
        return super().forward(x.bfloat16()).float()
