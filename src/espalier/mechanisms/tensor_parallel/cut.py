"""Cuts a model for tensor parallelism from outside: its modules keep their class and names, and get this rank's slice
of each matrix, and a forward that exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.kernels.linear_cross_entropy import HeadWords, linear_cross_entropy
from espalier.mechanisms.tensor_parallel import layers
from espalier.mechanisms.tensor_parallel.stream import Stream
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import Holders, ModelCut, Slab
from espalier.parallel.tensor_roles import DIM, ModuleWithRole, check, even, modules_with_roles
from espalier.parallel.workload import Role


def cut_model(model: nn.Module, roles: Mapping[str, Role], stream: Stream, mesh: ProcessMesh, cut: ModelCut) -> None:
    """Cuts `model` in place, and says in `cut` what this rank has of it. Raises UserError where it does not divide."""
    parts = modules_with_roles(model, roles)
    check(parts, stream.ranks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    everywhere = {name: Holders(stream.ranks) for name in names.values()}
    among = mesh.mesh.members(mesh.rank, "tp")
    for part in parts:
        if part.role.kind == "partial":
            for parameter in part.module.parameters(recurse=False):
                everywhere[names[parameter]] = Holders(stream.ranks, stream.group)
        elif part.role.kind in DIM:
            copies = 1 if part.role.copies is None else part.role.copies(stream.ranks)
            first = stream.rank - stream.rank % copies
            for name, parameter in part.module.named_parameters(recurse=False):
                known = names[parameter]
                if known not in cut.slabs and (
                    name != "bias" or DIM[part.role.kind] == 0
                ):  # else added once, to the sum
                    cut.slabs[known] = _slice(part, parameter, stream, first == stream.rank)
                    everywhere[known] = Holders(copies, mesh.of(among[first : first + copies]))
                elif known not in cut.slabs and stream.sharded:  # to each rank's tokens
                    everywhere[known] = Holders(stream.ranks, stream.group)
    cut.holders |= everywhere
    _install(parts, stream)


def _slice(part: ModuleWithRole, parameter: nn.Parameter, stream: Stream, stands: bool) -> Slab:
    """Leaves this rank's slice of a parameter. Returns where it lies."""
    first, last = part.share(stream.rank, stream.ranks)
    dim = DIM[part.role.kind]
    whole = parameter.shape
    parameter.data = parameter.detach().narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    return Slab(whole, tuple(first if index == dim else 0 for index in range(len(whole))), stream.group, stands)


def _install(parts: Sequence[ModuleWithRole], stream: Stream) -> None:
    """Gives every module its forward."""
    together: defaultdict[str, list[ModuleWithRole]] = defaultdict(list)
    for part in parts:
        module = part.module
        if part.role.kind in ("column", "words"):
            together[part.name.rpartition(".")[0]].append(part)
        elif part.role.kind == "row":
            module.forward = layers.row_forward(stream, module)
        elif part.role.kind == "table" and isinstance(part.module, nn.Embedding):
            first, _ = part.share(stream.rank, stream.ranks)
            module.forward = layers.table_forward(stream, module, first)
        elif part.role.kind == "region":
            module.forward = layers.region_forward(stream, module.forward)
        elif part.role.kind == "head":
            _install_head(module, stream)
    for siblings in together.values():
        _install_columns(siblings, stream)


def _install_columns(siblings: Sequence[ModuleWithRole], stream: Stream) -> None:
    columns = layers.Columns(stream, [partial(getattr, sibling.module, "weight") for sibling in siblings])
    for number, sibling in enumerate(siblings):
        module: Any = sibling.module
        module.forward = layers.column_forward(columns, number, module)
        if sibling.role.kind == "words":
            module.forward = layers.words_forward(module.forward, stream, sibling.total)


def _install_head(model: Any, stream: Stream) -> None:
    """The seams of a model whose head is cut by words. `turn` and `through` tell the stream how many tokens pass: also
    where another rank has the table, and where backward computes a block again."""
    turn = model.turn
    through = model.through

    def turned(tokens: Tensor, *more: Any) -> Any:
        stream.begin(tokens)
        return turn(tokens, *more)

    def passed(block: Any, *given: Any) -> Any:
        tokens = stream.tokens

        def again(*x: Any) -> Any:
            stream.tokens = tokens
            return block(*x)

        return through(again, *given)

    model.turn = turned
    model.through = passed
    columns = layers.Columns(stream, [lambda: model.words])
    total = model.size.vocabulary
    first, _ = even(total, stream.rank, stream.ranks)

    def largest(values: Tensor) -> Tensor:
        return stream.sum(values, dist.ReduceOp.MAX)()

    def predict(x: Tensor, words: Tensor, last: int) -> Tensor:
        return layers.whole_words(columns.product(0, x), stream, total)[:, -last:]

    def score(x: Tensor, words: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
        cap = model.size.logit_cap
        if chunk:
            head = HeadWords(words, cap, first, largest, lambda values: stream.sum(values)())
            return linear_cross_entropy(layers.whole_tokens(x, stream), head, targets.flatten(), chunk)
        logits = columns.product(0, x)
        return layers.cross_entropy_sum(logits if cap is None else cap * (logits / cap).tanh(), targets, stream, first)

    model.predict = predict
    model.score = score
