"""Layers of a model that an optimizer node holds, and the Protocol of the client through which workers reach it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

from espalier.plan.axes.node_layout import FlatLayer
from espalier.recipe.errors import RunFailed, UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from espalier.parallel.workload import Pieces


class StepLost(RunFailed):
    """A node has started again, or another has taken its place, at a step whose gradients it does not have.
    `LayerClient.recover` says which step has to be done again.

    Attributes:
        again: what it said, where it was called already.
    """

    again: int | None = None


def step_lost(step: int) -> StepLost:
    """The error of a node that stands at `step`."""
    return StepLost(
        f"An optimizer node has started again at step {step}, and needs the gradients of that step once more.",
        do="call recover() on the client and compute that step again",
    )


class LayerClient(Protocol):
    """A worker's connection to the node or nodes. Pulls and pushes of a worker are each served in their order."""

    @property
    def step(self) -> int:
        """Steps of the state that the nodes hold."""

    def pull(self, layer: int, step: int, out: Tensor) -> Any:
        """Begins to read a layer as it is after `step` steps into `out`, fp32 [numel]. Returns a handle."""

    def push(self, layer: int, step: int, tensor: Tensor) -> Any:
        """Begins to send this worker's gradient of step `step`, fp32 [numel]. Returns a handle."""

    def wait(self, handle: Any) -> None:
        """Returns when it is done: `out` is filled, or `tensor` may be written again."""

    def totals(self, step: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Waits for the gradients of all workers. Returns the sum of their `values` (float64 [any], in rank order) and
        the fp32 2-norms of the summed gradient of each tensor, of all layers in order."""

    def ended(self, step: int) -> tuple[Tensor, Tensor]:
        """`totals` of step `step` where the nodes have ended it, and `recover` was called since. Raises StepLost where
        they do not have them."""

    def move(self, step: int, scale: float, rate: float, following: float | None = None) -> None:
        """Ends step `step`: one update with the gradient times `scale` and the learning rate times `rate`. `following`:
        the rate expected of the next step, which the nodes may then take while its gradients still come, and undo."""

    def settle(self, step: int) -> None:
        """Returns when the nodes' files hold the state of `step` steps."""

    def recover(self) -> int:
        """Connects again after StepLost. Returns the step that is to be made now; what was on its way is void."""

    def read(self) -> Mapping[str, float]:
        """Bytes that the nodes' disks have `read` and `written` in the steps since it was asked last."""

    def close(self) -> None:
        """Ends the connection."""


def layers_of(
    model: nn.Module, pieces: Pieces | None, holders: Mapping[str, Sequence[int]] = MappingProxyType({})
) -> tuple[list[FlatLayer], list[list[int]], list[list[nn.Parameter]]]:
    """(layers, for each piece of the model the layers it uses, the parameters of each layer).

    Parameters that the same pieces use are one layer, so that what several share (a tied table) is one of its own; so
    are those of them that other ranks hold (experts). Frozen parameters are in none.

    Args:
        holders: ranks that hold a parameter, by its name, where not all hold the same.

    Raises UserError: the model has no pieces, or a trainable parameter is in none of them.
    """
    if pieces is None:
        raise UserError(
            f"{type(model).__name__} cannot be held in layers.",
            why="nothing says which of its modules come one after the other, each once in a forward pass",
            do="return `pieces` from model.build, or keep its parameters on the ranks: leave role = "
            '"optimizer" out of the cluster, plan.pin.offload=none',
        )
    used: dict[int, tuple[int, ...]] = {}
    for piece, piece_modules in enumerate(pieces.modules):
        for parameter in dict.fromkeys(parameter for module in piece_modules for parameter in module.parameters()):
            used[id(parameter)] = (*used.get(id(parameter), ()), piece)
    groups: dict[tuple[tuple[int, ...], int], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if id(parameter) not in used:
            raise UserError(
                f"{type(model).__name__} cannot be held in layers: {name} is in none of its pieces.",
                do="name its module in `Pieces.modules`",
            )
        key = used[id(parameter)], -len(holders.get(name, ()))  # what most ranks hold is first
        groups.setdefault(key, []).append((name, parameter))
    ordered = sorted(groups.items())
    layers = [
        FlatLayer(_common(names), tuple((name, tuple(parameter.shape)) for name, parameter in piece_parameters))
        for _, piece_parameters in ordered
        for names in ([name for name, _ in piece_parameters],)
    ]
    uses: list[list[int]] = [[] for _ in pieces.modules]
    for number, ((users, _), _) in enumerate(ordered):
        for piece in users:
            uses[piece].append(number)
    return layers, uses, [[parameter for _, parameter in piece_parameters] for _, piece_parameters in ordered]


def _common(names: Sequence[str]) -> str:
    """What the names of a layer's parameters begin with."""
    parts = [name.split(".") for name in names]
    shared = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    return ".".join(shared) or names[0]


Fill = Callable[[int, "Tensor"], object]
"""Writes the initial values of a layer into a flat fp32 vector."""


def filler(layers: Sequence[FlatLayer], value: Callable[[str], Tensor]) -> Fill:
    """Writes what `value` gives for each parameter's name."""

    def fill(layer: int, flat: Tensor) -> None:
        for (name, _), view in zip(layers[layer].tensors, layers[layer].views(flat), strict=True):
            view.copy_(value(name))

    return fill
