"""Cuts a model for tensor parallelism from outside: its modules keep their class and names, and get this rank's slice
of each matrix, and a forward that exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from espalier.errors import UserError
from espalier.parallel.mesh import ProcessMesh
from espalier.parallel.model_cut import Holders, ModelCut, Slab
from espalier.tensor import layers
from espalier.tensor.stream import Stream, even
from espalier.workload import Role

DIM = {"column": 0, "columns": 0, "table": 0, "words": 0, "row": 1, "rows": 1}
"""The dimension of `weight` that each kind of module is cut along."""


class Found(NamedTuple):
    """A module, its role, and how many rows or columns it has that can be divided."""

    name: str
    module: Any
    role: Role
    total: int

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        """What a rank has of it: `[first, last)` along the dimension that is cut."""
        if self.role.share is not None:
            return self.role.share(rank, ranks)
        return even(self.total, rank, ranks)

    def fits(self, ranks: int) -> bool:
        """Whether every rank gets something."""
        shares = [self.share(rank, ranks) for rank in range(ranks)]
        return all(first < last for first, last in shares)


def found(model: nn.Module, roles: Mapping[str, Role]) -> list[Found]:
    """The modules that have a role. Raises UserError for one of a class that cannot have it, and where none has any."""
    made = []
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        pattern = next((one for one in roles if fnmatchcase(name, one)), None)
        if pattern is not None:
            dim = DIM.get(roles[pattern].kind)
            if dim is not None:
                _refuse_other(name, module, roles[pattern])
            made.append(Found(name, module, roles[pattern], 0 if dim is None else module.weight.shape[dim]))
    if not any(one.role.kind in DIM for one in made):
        raise UserError(
            f"None of the modules that ranks are to share is in {type(model).__name__}.",
            why=f"its plan names {', '.join(roles)}",
            do="the names of `model.named_modules()`, with * for a number",
        )
    return made


def _refuse_other(name: str, module: nn.Module, role: Role) -> None:
    """Raises UserError for a module that computes something else than what is cut."""
    kinds = (nn.Linear, nn.Embedding) if role.kind == "table" else (nn.Linear,)
    plain = any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
    if not plain or getattr(module, "max_norm", None) is not None:
        raise UserError(
            f"Ranks cannot share {name}: {type(module).__name__} is no plain {' or '.join(k.__name__ for k in kinds)}.",
            why="its own forward is not known",
            do="leave it out of the tensor-parallel plan, or tp = 1",
        )


def check(parts: Sequence[Found], ranks: int) -> None:
    """Raises UserError where some rank would get nothing of a matrix: names it, and the nearest number of ranks."""
    cut = [one for one in parts if one.role.kind in DIM]
    for one in cut:
        if not one.fits(ranks):
            near = max(count for count in range(1, ranks) if all(other.fits(count) for other in cut))
            raise UserError(
                f"tp = {ranks} ranks cannot share {one.name or 'the model'}: its {one.role.unit} do not divide.",
                do=f"tp = {near}",
            )


def cut_model(model: nn.Module, roles: Mapping[str, Role], stream: Stream, mesh: ProcessMesh, cut: ModelCut) -> None:
    """Cuts `model` in place, and says in `cut` what this rank has of it. Raises UserError where it does not divide."""
    parts = found(model, roles)
    check(parts, stream.ranks)
    names = {parameter: name for name, parameter in model.named_parameters()}
    everywhere = {name: Holders(stream.ranks) for name in names.values()}
    among = mesh.mesh.members(mesh.rank, "tp")
    for one in parts:
        if one.role.kind == "partial":
            for parameter in one.module.parameters(recurse=False):
                everywhere[names[parameter]] = Holders(stream.ranks, stream.group)
        elif one.role.kind in DIM:
            copies = 1 if one.role.copies is None else one.role.copies(stream.ranks)
            first = stream.rank - stream.rank % copies
            for name, parameter in one.module.named_parameters(recurse=False):
                known = names[parameter]
                if known not in cut.slabs and (
                    name != "bias" or DIM[one.role.kind] == 0
                ):  # else added once, to the sum
                    cut.slabs[known] = _slice(one, parameter, stream, first == stream.rank)
                    everywhere[known] = Holders(copies, mesh.of(among[first : first + copies]))
    cut.holders |= everywhere
    _install(parts, stream)


def _slice(one: Found, parameter: nn.Parameter, stream: Stream, stands: bool) -> Slab:
    """Leaves this rank's slice of a parameter. Returns where it lies."""
    first, last = one.share(stream.rank, stream.ranks)
    dim, whole = DIM[one.role.kind], parameter.shape
    parameter.data = parameter.detach().narrow(dim, first, last - first).clone(memory_format=torch.contiguous_format)
    parameter.grad = None
    return Slab(whole, tuple(first if index == dim else 0 for index in range(len(whole))), stream.group, stands)


def _install(parts: Sequence[Found], stream: Stream) -> None:
    """Gives every module its forward."""
    together: defaultdict[str, list[Found]] = defaultdict(list)
    for one in parts:
        module = one.module
        if one.role.kind in ("column", "words"):
            together[one.name.rpartition(".")[0]].append(one)
        elif one.role.kind == "row":
            module.forward = layers.row_forward(stream, module)
        elif one.role.kind == "table" and isinstance(one.module, nn.Embedding):
            first, _ = one.share(stream.rank, stream.ranks)
            module.forward = layers.table_forward(stream, module, first)
        elif one.role.kind == "region":
            module.forward = layers.region_forward(stream, module.forward)
        elif one.role.kind == "head":
            _install_head(module, stream)
    for siblings in together.values():
        _install_columns(siblings, stream)


def _install_columns(siblings: Sequence[Found], stream: Stream) -> None:
    columns = layers.Columns(stream, [partial(getattr, one.module, "weight") for one in siblings])
    for number, one in enumerate(siblings):
        module: Any = one.module
        module.forward = layers.column_forward(columns, number, module)
        if one.role.kind == "words":
            module.forward = layers.words_forward(module.forward, stream, one.total)


def _install_head(model: Any, stream: Stream) -> None:
    """The seams of a model whose head is cut by words. `turn` and `through` tell the stream how many tokens pass: also
    where another rank has the table, and where backward computes a block again."""
    turn, through = model.turn, model.through

    def turned(tokens: Tensor, *more: Any) -> Any:
        stream.begin(tokens)
        return turn(tokens, *more)

    def passed(block: Any, *given: Any) -> Any:
        tokens = stream.tokens

        def again(*x: Any) -> Any:
            stream.tokens = tokens
            return block(*x)

        return through(again, *given)

    model.turn, model.through = turned, passed
    columns = layers.Columns(stream, [lambda: model.words])
    total = model.size.vocabulary
    first, _ = even(total, stream.rank, stream.ranks)

    def predict(x: Tensor, words: Tensor) -> Tensor:
        return layers.whole_words(columns.product(0, x), stream, total)

    def score(x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        logits, cap = columns.product(0, x), model.size.logit_cap
        return layers.cross_entropy_sum(logits if cap is None else cap * (logits / cap).tanh(), targets, stream, first)

    model.predict, model.score = predict, score
