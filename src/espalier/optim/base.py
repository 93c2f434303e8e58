"""How does a parameter move? The Protocol of an optimizer, and its state under the parameters' own names.

State is kept by parameter name and created at once rather than at the first step, so that it can be saved, restored and
resharded by name like the parameters themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class Owned(NamedTuple):
    """A parameter, or the piece of one that this rank moves: elements from `start` on of its row-major order.

    `tensor` has the parameter's own shape where it is all of it, else it is 1-D. `shape` is the whole parameter's.
    """

    name: str
    tensor: nn.Parameter
    shape: torch.Size
    start: int = 0

    @property
    def whole(self) -> bool:
        """All of the parameter is in `tensor`."""
        return self.tensor.shape == self.shape


class Optimizer(Protocol):
    """Moves named parameters by their gradients. Stateful (see `checkpoint.base`)."""

    def step(self, factor: float) -> None:
        """One update from `.grad`, every group's learning rate times `factor`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """`name/kind` -> tensor, such as `blocks.0.attention.qkv.weight/exp_avg`."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies `state` into the existing tensors."""
        ...


class OptimizerGroup:
    """One torch optimizer over named parameters, with its own learning rates. Has state."""

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned]) -> None:
        self.optimizer = optimizer
        self.owned = owned
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]

    def step(self, factor: float) -> None:
        """One update, each group's rate times `factor`."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """`name/kind` -> tensor."""
        found: dict[str, Any] = {}
        for one in self.owned:
            for kind, value in self.optimizer.state[one.tensor].items():
                found[f"{one.name}/{kind}"] = value
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copies the tensors of `state` into this optimizer's."""
        for key, value in self.state_dict().items():
            value.copy_(state[key])


class Together:
    """Several optimizers over disjoint parameters, moved as one. Has state."""

    def __init__(self, members: list[Optimizer]) -> None:
        self.members = members

    def step(self, factor: float) -> None:
        """One update of every member."""
        for member in self.members:
            member.step(factor)

    def state_dict(self) -> dict[str, Any]:
        """The members' states side by side; names do not collide because parameters are disjoint."""
        return {key: value for member in self.members for key, value in member.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Each member takes its own names from `state`."""
        for member in self.members:
            member.load_state_dict(state)


def owned_by(model: nn.Module) -> list[Owned]:
    """The trainable parameters of a model that lies on this rank as a whole."""
    return [Owned(name, parameter, parameter.shape) for parameter, name in names_of(model).items()]


def names_of(model: nn.Module) -> dict[nn.Parameter, str]:
    """Trainable parameters -> name; a tied parameter is listed once, under its first name."""
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}


def zeros_like(parameter: Tensor) -> Tensor:
    """State for `parameter`: zeros of its shape, dtype, device and layout."""
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)
