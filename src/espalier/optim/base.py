"""How does a parameter move? The Protocol of an optimizer, and its state under the parameters' own names.

State is kept by parameter name and created at once rather than at the first step, so that it can be saved, restored and
resharded by name like the parameters themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

StateDict = dict[str, Any]
"""`name/kind` -> tensor, such as `blocks.0.attention.qkv.weight/exp_avg`."""


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

    def state_dict(self) -> StateDict:
        """`name/kind` -> tensor, such as `blocks.0.attention.qkv.weight/exp_avg`."""

    def load_state_dict(self, state: StateDict) -> None:
        """Copies `state` into the existing tensors."""


Batches = Callable[[Sequence[torch.Size]], list[list[int]]]
"""Which parameters, by their shapes, an optimizer computes together: indices of each batch."""


@dataclass(frozen=True)
class StateKinds:
    """What an optimizer keeps of each parameter.

    Attributes:
        shaped: names of the states that have the parameter's shape and dtype.
        counted: names of those that are one number.
        batches: parameters that are moved together, each whole; None: element by element, so that pieces of a
            parameter may be moved one after the other.
    """

    shaped: tuple[str, ...]
    counted: tuple[str, ...] = ()
    batches: Batches | None = None


class WithoutCompiler:
    """A torch optimizer whose methods do nothing for torch.compile: for that torch's own import torch._dynamo, which
    takes as long as torch itself."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


class OptimizerGroup:
    """One torch optimizer over named parameters, with its own learning rates. Has state, made here: zeros."""

    def __init__(self, optimizer: torch.optim.Optimizer, owned: Sequence[Owned], kinds: StateKinds) -> None:
        self.optimizer = optimizer
        self.owned = owned
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        for parameter in owned:
            optimizer.state[parameter.tensor] = {
                **{
                    kind: torch.zeros((), dtype=torch.float32, device=parameter.tensor.device) for kind in kinds.counted
                },
                **{kind: zeros_like(parameter.tensor) for kind in kinds.shaped},
            }

    def step(self, factor: float) -> None:
        """One update, each group's rate times `factor`."""
        set_rates(self.optimizer, self.rates, factor)
        self.optimizer.step()

    def state_dict(self) -> StateDict:
        """`name/kind` -> tensor."""
        state: StateDict = {}
        for parameter in self.owned:
            for kind, value in self.optimizer.state[parameter.tensor].items():
                state[f"{parameter.name}/{kind}"] = value
        return state

    def load_state_dict(self, state: StateDict) -> None:
        """Copies the tensors of `state` into this optimizer's."""
        for key, value in self.state_dict().items():
            value.copy_(state[key])


MakeGroup = Callable[[torch.optim.Optimizer, Sequence[Owned], StateKinds], Optimizer]
"""Makes what moves parameters by a torch optimizer that has no state yet. `OptimizerGroup` is the plain one."""


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float], factor: float) -> None:
    """Each group's learning rate: its own of `rates` times `factor`."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor


class Together:
    """Several optimizers over disjoint parameters, moved as one. Has state."""

    def __init__(self, members: list[Optimizer]) -> None:
        self.members = members

    def step(self, factor: float) -> None:
        """One update of every member."""
        for member in self.members:
            member.step(factor)

    def state_dict(self) -> StateDict:
        """The members' states side by side; names do not collide because parameters are disjoint."""
        return {key: value for member in self.members for key, value in member.state_dict().items()}

    def load_state_dict(self, state: StateDict) -> None:
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
