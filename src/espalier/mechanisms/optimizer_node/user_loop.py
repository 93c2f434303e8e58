"""Anybody's module in anybody's loop, its parameters and AdamW's states on optimizer nodes.

The loop stays as it is: forward, backward, `optimizer.step()`, `optimizer.zero_grad()`. Blocks of the model are pulled
before they compute and freed after; in backward each pushes its gradient as soon as that is complete.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from espalier.mechanisms.optimizer_node.client import Client
from espalier.mechanisms.optimizer_node.node import OptimizerNode
from espalier.mechanisms.optimizer_node.state_file import open_state, open_sums
from espalier.parallel.layer_client import LayerClient as Connected
from espalier.parallel.layer_client import StepLost, filler
from espalier.plan.axes.node_layout import FlatLayer, NodeJob, Push
from espalier.recipe import Adamw
from espalier.recipe.errors import UserError
from espalier.train.layer_window import LayerWindow, hold_layers
from espalier.train.wrap_policy import Membership, blocks_of

OUTSIDE = "outside of blocks"


def job_of(model: nn.Module, optimizer: torch.optim.Optimizer, workers: int = 1, push: Push = "fp32") -> NodeJob:
    """What a node and the workers of a loop agree on: a layer for each block of `model`, and one for the rest.

    Args:
        optimizer: `torch.optim.AdamW` or `Adam` over all its parameters; matrices decay, vectors do not.
        workers: how many push gradients.
        push: how gradients cross the wire: `fp32`, `int16` or `int8` (with error feedback).

    Raises UserError for another optimizer, or other groups of parameters.
    """
    return NodeJob(tuple(layer for layer, _ in _layers(model)), _options(optimizer), push, workers=workers)


def start_node(
    folder: str | Path, job: NodeJob, model: nn.Module, token: str, address: tuple[str, int]
) -> OptimizerNode:
    """An optimizer node with its files in `folder`, in threads of this process: `wait` and `close` it.

    A new one begins with the parameters of `model`; one whose files are there goes on with these. `token`: a secret
    that nodes and workers share; `address`: host and port where it listens (port 0: any, `node.door` has it).
    """
    values = dict(model.named_parameters())
    place = Path(folder)
    state = open_state(place, job, filler(job.layers, lambda name: values[name].detach().float()))
    return OptimizerNode(job, (state, open_sums(place, job)), socket.create_server(address), token).start()


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, client: Connected, clip: float = 0.0) -> AttachedLoop:
    """Takes the parameters of `model` to the nodes behind `client`; the loop goes on as before.

    Args:
        model: its trainable parameters are freed; they may be on the meta device. Frozen ones stay, and are not sent.
        optimizer: the one that `job_of` was given. Its `step` moves the parameters on the nodes, at its learning rate.
        client: made with the same job (`Client(addresses, rank, job, token)`); `client.step` steps were made before.
        clip: the most that the global norm of the gradient may be; 0: any. `clip_grad_norm_` sees no gradients here.

    Gradients of several workers are averaged. Raises UserError where a second backward pass comes before a step.
    """
    return AttachedLoop(model, optimizer, client, clip)


class AttachedLoop:
    """The hooks on a model and its optimizer. Has state: which blocks are in backward, and what was pushed.

    `detach` brings all parameters back and takes the hooks off.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, client: Connected, clip: float) -> None:
        self.model, self.optimizer, self.client, self.clip = model, optimizer, client, clip
        _options(optimizer)
        self.base = float(optimizer.param_groups[0]["lr"])
        layers, parameters = zip(*_layers(model), strict=True)
        window_layers, count = hold_layers(model, layers, parameters), len(layers)
        self.root = 0 if layers[0].name == OUTSIDE else None
        self.first = 0 if self.root is None else 1
        pieces = [[index] for index in range(count)]
        self.window = LayerWindow(client, window_layers, pieces, min(count, self.first + 3))
        self._order = list(reversed(range(count)))
        self._missing, self._backward = [0] * count, [False] * count
        self._pushed = count
        self._open, self._rate = False, 1.0
        self._hooks: list[Any] = [
            model.register_forward_pre_hook(self._enter_model, prepend=True),
            model.register_forward_hook(self._leave_model),
        ]
        for index, block in enumerate(_trained(model), start=self.first):
            self._watch(index, block)
        for index, layer in enumerate(window_layers):
            for parameter in layer.parameters:
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._arrival(index)))
        self._plain_step = optimizer.step

        def step(_: torch.optim.Optimizer, closure: Any = None) -> None:  # schedulers wrap it as a method of its own
            if closure is not None:
                raise UserError("step(closure) is not supported.", do="call backward first, then step()")
            self._step()

        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def detach(self) -> None:
        """Every parameter is here again, and the loop a plain one."""
        for hook in self._hooks:
            hook.remove()
        self.optimizer.step = self._plain_step  # type: ignore[method-assign]
        self.window.keep()

    def recover(self) -> int:
        """Goes on after StepLost: a node has started again. Returns the step that the loop has to make now."""
        self._backward = [False] * len(self.window.layers)
        self._open, self._pushed = False, len(self._order)
        return self.window.recover()

    def close(self) -> None:
        """Returns when the nodes' files hold the last step, and leaves the nodes."""
        self.window.settle()
        self.client.close()

    # --- forward -----------------------------------------------------------------------------------------------------

    def _watch(self, index: int, block: nn.Module) -> None:
        def enter(module: nn.Module, inputs: Any) -> None:
            self.window.need(index)

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._backward[index]:  # computed again
                return
            trained = self._hook_backward(output, index)
            if not (trained and index == len(self.window.layers) - 1):  # else its backward comes next
                self.window.release(index)

        self._hooks.append(block.register_forward_pre_hook(enter, prepend=True))
        self._hooks.append(block.register_forward_hook(leave))

    def _enter_model(self, module: nn.Module, inputs: Any) -> None:
        forward = list(range(len(self.window.layers)))
        self.window.begin(forward + (forward[self.first : -1][::-1] if torch.is_grad_enabled() else []))
        if self.root is not None:
            self.window.need(self.root)

    def _leave_model(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._hook_backward(output, self.root):
            self.window.drop()

    def _hook_backward(self, output: Any, index: int | None) -> bool:
        """Begins backward of a layer (None: there is none) with the first gradient of `output`; whether it has any."""
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        if outputs and index is not None:
            torch.autograd.graph.register_multi_grad_hook(outputs, lambda _: self._begin(index), mode="any")
        return bool(outputs)

    # --- backward ----------------------------------------------------------------------------------------------------

    def _begin(self, index: int) -> None:
        if not self._open:
            if self._pushed < len(self._order) or self._pushed == -1:
                raise UserError(
                    "A second backward pass came before optimizer.step().",
                    why="gradients leave for the optimizer node as soon as they are complete",
                    do="one backward pass for each step, with a smaller batch on each of more workers",
                )
            self._open, self._pushed = True, 0
            self._missing = [len(layer.parameters) for layer in self.window.layers]
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        self._backward[index] = True
        self.window.need(index)

    def _arrival(self, index: int) -> Any:
        def arrived(_: Tensor) -> None:
            self._missing[index] -= 1
            if not self._missing[index]:
                self._push_ready()

        return arrived

    def _push_ready(self, everything: bool = False) -> None:
        """In one order on all workers."""
        while self._pushed < len(self._order) and (everything or not self._missing[self._order[self._pushed]]):
            index = self._order[self._pushed]
            self.window.push(index)
            self.window.release(index)
            self._backward[index] = False
            self._pushed += 1

    def _end(self) -> None:
        self._push_ready(everything=True)
        self._open, self._pushed = False, -1

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        if self._pushed != -1:
            return  # no gradients
        workers, norms = self.window.totals(torch.ones(1, dtype=torch.float64))
        scale = 1.0 / float(workers[0])
        norm = float(torch.linalg.vector_norm(norms)) * scale
        if self.clip and norm > self.clip:
            scale *= self.clip / norm
        rate = float(self.optimizer.param_groups[0]["lr"]) / self.base
        self.window.move(scale, rate, following=rate if rate == self._rate else None)
        self._rate = rate
        self._pushed = len(self._order)


def _layers(model: nn.Module) -> list[tuple[FlatLayer, list[nn.Parameter]]]:
    """What is outside of blocks first, then each block, with its trainable parameters."""
    blocks = _trained(model)
    member = Membership(model, blocks)
    groups: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            block = member.of(parameter)
            groups.setdefault(-1 if block is None else block, []).append((name, parameter))
    return [
        (
            FlatLayer(
                OUTSIDE if block < 0 else f"block {block}",
                tuple((name, tuple(parameter.shape)) for name, parameter in named),
            ),
            [parameter for _, parameter in named],
        )
        for block, named in sorted(groups.items())
    ]


def _trained(model: nn.Module) -> list[nn.Module]:
    """The blocks that have a layer of their own."""
    return [block for block in blocks_of(model) if any(parameter.requires_grad for parameter in block.parameters())]


def _options(optimizer: torch.optim.Optimizer) -> Adamw:
    """Of a torch AdamW or Adam."""
    groups: Sequence[dict[str, Any]] = optimizer.param_groups
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW) or groups[0]["amsgrad"]:
        raise UserError(
            f"An optimizer node runs AdamW, not {type(optimizer).__name__}.", do="torch.optim.AdamW(model.parameters())"
        )
    decays = {group["weight_decay"] for group in groups for tensor in group["params"] if tensor.ndim >= 2}
    others = {group["weight_decay"] for group in groups for tensor in group["params"] if tensor.ndim < 2}
    same = {(group["lr"], group["betas"], group["eps"]) for group in groups}
    if len(decays) > 1 or others - {0.0} or len(same) > 1:
        raise UserError(
            "An optimizer node decays matrices and not vectors, at one learning rate.",
            why="the optimizer's groups say otherwise",
            do="two groups: matrices with weight_decay, the rest with weight_decay=0",
        )
    coupled = not isinstance(optimizer, torch.optim.AdamW)
    return Adamw(
        learning_rate=groups[0]["lr"], weight_decay=max(decays, default=0.0), betas=tuple(groups[0]["betas"]),
        epsilon=groups[0]["eps"], coupled=coupled,
    )  # fmt: skip


__all__ = ["AttachedLoop", "Client", "NodeJob", "StepLost", "attach", "job_of", "start_node"]
