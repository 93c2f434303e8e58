"""Wrap policy: the blocks of a model, which are gathered at once, and what depends on its own parameters only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from espalier.parallel.tensor_roles import DIM, modules_with_roles
from espalier.parallel.workload import Role
from espalier.plan.axes.flat_layout import Sized, runs
from espalier.recipe.cost import Profile, Tally
from espalier.train.seams import expert_numbers, fields_of

LISTS = (nn.ModuleList, nn.Sequential)
ATTENTION = ("attention", "attn", "self_attention", "self_attn")
"""What models call the attention of their blocks."""


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of any model, in its own order: the entries of its outermost lists of two modules or more.

    Entries that hold no parameter do not count; a list of one, or a list inside an entry, is part of what holds it.
    """
    entries = [child for child in model.children() if any(True for _ in child.parameters())]
    if isinstance(model, LISTS) and len(entries) > 1:
        return list(dict.fromkeys(entries))
    return list(dict.fromkeys(block for child in entries for block in blocks_of(child)))


def attention_of(block: nn.Module) -> nn.Module | None:
    """The attention of a block, the last where it has several: what fills the seam `attend`, PyTorch's own, or a module
    that bears its name. None: it has none."""
    filled = [module for module, _ in fields_of(block, "attend")]
    counted = [
        module
        for name, module in block.named_modules()
        if module in filled or isinstance(module, nn.MultiheadAttention) or name.rpartition(".")[2] in ATTENTION
    ]
    return counted[-1] if counted else None


def norms_of(model: nn.Module) -> set[int]:
    """The ids of the parameters of normalising layers."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
    return {id(p) for module in model.modules() if isinstance(module, kinds) for p in module.parameters(recurse=False)}


class Membership:
    """Which parameters belong to which of `blocks`. One that is also used outside its block belongs to none."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        inside = {id(module) for block in blocks for module in block.modules()}
        outside = [module for module in model.modules() if id(module) not in inside]
        shared = {id(parameter) for module in outside for parameter in module.parameters(recurse=False)}
        self._block: dict[int, int] = {}
        for index, block in enumerate(blocks):
            for parameter in block.parameters():
                if self._block.setdefault(id(parameter), index) != index:
                    shared.add(id(parameter))
        for key in shared:
            self._block.pop(key, None)

    def of(self, parameter: nn.Parameter) -> int | None:
        """The index of its block, None outside all blocks."""
        return self._block.get(id(parameter))


def sizes_of(
    model: nn.Module,
    blocks: Sequence[nn.Module] | None = None,
    embeddings: Collection[nn.Parameter] = (),
    trained: bool = True,
) -> tuple[Sized, ...]:
    """The trainable parameters of `model` in its order, each once; or the frozen ones."""
    member = Membership(model, blocks_of(model) if blocks is None else blocks)
    exact = norms_of(model)
    outside = {id(parameter) for parameter in embeddings}
    experts = expert_numbers(model)
    return tuple(
        Sized(
            p.numel(),
            p.element_size(),
            member.of(p),
            (str(p.dtype), p.dtype == torch.float32 and id(p) not in exact),
            p.ndim == 2 and id(p) not in outside,
            range(experts[name], experts[name] + 1) if name in experts else range(0),
        )
        for name, p in model.named_parameters()
        if p.requires_grad == trained
    )


def tally(
    model: nn.Module, blocks: Sequence[nn.Module] | None = None, embeddings: Collection[nn.Parameter] = ()
) -> Tally:
    """Counts `model`; a tied parameter is counted once, and what moves are the statistics of normalising layers."""
    sizes = sizes_of(model, blocks, embeddings)
    outside = set(embeddings)
    kinds = nn.modules.batchnorm._NormBase
    matrices = (p for p in model.parameters() if p.requires_grad and p.ndim == 2 and p not in outside)
    buffers = [buffer for m in model.modules() if isinstance(m, kinds) for buffer in m.buffers(recurse=False)]
    floats = sum(buffer.numel() for buffer in buffers if buffer.is_floating_point())
    return Tally(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        trainable=sum(sized.elements for sized in sizes),
        tensors=len(sizes),
        matrices=Counter((matrix.shape[0], matrix.shape[1]) for matrix in matrices),
        sizes=runs(sizes),
        untrained=[sized for sized in sizes_of(model, blocks, trained=False) if sized.block is not None],
        running=(floats, sum(buffer.numel() for buffer in buffers) - floats),
    )


def deeper(sizes: Sequence[Sized], depth: int) -> tuple[Sized, ...]:
    """Those of a model of two blocks as of one of `depth` blocks, all like its second."""
    second = [index for index, sized in enumerate(sizes) if sized.block == 1]
    first = second[0]
    last = second[-1] + 1
    repeated = [sized._replace(block=block) for block in range(1, depth) for sized in sizes[first:last]]
    return (*sizes[:first], *repeated, *sizes[last:])


def on_last_rank(model: nn.Module, sizes: Sequence[Sized], roles: Mapping[str, Role], ranks: int) -> tuple[Sized, ...]:
    """`sizes` of `model` as the last of `ranks` ranks that share its matrices has them: of what does not divide, no
    other rank has more."""
    shares: dict[int, Fraction] = {}
    for part in modules_with_roles(model, roles):
        dim = DIM.get(part.role.kind)
        if dim is not None:
            first, last = part.share(ranks - 1, ranks)
            for name, parameter in part.module.named_parameters(recurse=False):
                if name != "bias" or dim == 0:
                    shares[id(parameter)] = Fraction(last - first, part.total)
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return tuple(
        sized._replace(elements=int(sized.elements * shares.get(id(parameter), 1)))
        for sized, parameter in zip(sizes, trainable, strict=True)
    )


def profile(workload: Any, remarks: Sequence[str] = ()) -> Profile:
    """What the planner is told of a model that is built to be counted. `workload`: has `Plain.anatomy`, or one of its
    own. `remarks`: see `Profile`."""
    model = workload.build(torch.device("cpu"), torch.float32)
    return Profile(
        **vars(tally(model, workload.blocks(model), workload.embeddings(model))),
        global_batch=workload.global_batch,
        tokens_per_sample=1.0,
        anatomy=workload.anatomy,
        remarks=remarks,
        tasks=len(workload.tasks()),
    )
