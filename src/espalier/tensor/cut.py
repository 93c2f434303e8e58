"""Cuts a model for tensor parallelism from outside: its modules keep their class and names, and get this rank's slice
of each matrix, and a forward that exchanges."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

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
    """The modules that have a role."""
    made = []
    modules: Iterable[tuple[str, Any]] = model.named_modules()
    for name, module in modules:
        pattern = next((one for one in roles if fnmatchcase(name, one)), None)
        if pattern is not None:
            dim = DIM.get(roles[pattern].kind)
            made.append(Found(name, module, roles[pattern], 0 if dim is None else module.weight.shape[dim]))
    return made


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
    everywhere = {name: Holders(stream.ranks) for name, _ in model.named_parameters()}
    among = mesh.mesh.members(mesh.rank, "tp")
    for one in parts:
        if one.role.kind == "partial":
            for name, _ in one.module.named_parameters(recurse=False):
                everywhere[_joined(one.name, name)] = Holders(stream.ranks, stream.group)
        elif one.role.kind in DIM:
            for name in _slice(one, stream, cut):
                copies = 1 if one.role.copies is None else one.role.copies(stream.ranks)
                first = stream.rank - stream.rank % copies
                everywhere[name] = Holders(copies, mesh.of(among[first : first + copies]))
    cut.holders |= everywhere
    _install(parts, stream)


def _slice(one: Found, stream: Stream, cut: ModelCut) -> list[str]:
    """Leaves this rank's slice of a module's parameters. Returns the names of those that are cut."""
    first, last = one.share(stream.rank, stream.ranks)
    dim, names = DIM[one.role.kind], []
    for name, parameter in list(one.module.named_parameters(recurse=False)):
        if name == "bias" and dim == 1:
            continue  # added once, to the sum
        whole = parameter.shape
        slices = tuple(slice(first, last) if index == dim else slice(None) for index in range(len(whole)))
        kept = nn.Parameter(parameter.detach()[slices].clone(), requires_grad=parameter.requires_grad)
        setattr(one.module, name, kept)
        cut.slabs[_joined(one.name, name)] = Slab(whole, tuple(part.start or 0 for part in slices))
        names.append(_joined(one.name, name))
    return names


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
    """The seams `predict` and `score` of a model whose head is cut by words."""
    columns = layers.Columns(stream, [lambda: model.words])
    total = model.size.vocabulary
    first, _ = even(total, stream.rank, stream.ranks)

    def predict(x: Tensor, words: Tensor) -> Tensor:
        return layers.whole_words(columns.product(0, x), stream, total)

    def score(x: Tensor, words: Tensor, targets: Tensor) -> Tensor:
        return layers.cross_entropy_sum(columns.product(0, x), targets, stream, first)

    model.predict, model.score = predict, score


def _joined(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf
