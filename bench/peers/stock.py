"""The composition of a torchtitan user: DTensor tensor parallelism, FSDP2 and 1F1B of torch.distributed.pipelining.

The decoder is plain PyTorch with the names of Espalier's, whose weights it takes. It is cut as torchtitan cuts its
Llama: sequence parallelism between matrices, parallel loss, FSDP2 round each block, whole blocks to a stage. Sequences
are cut over ranks by an all-gather of keys and values with mirrored halves, as torch's own `context_parallel` has it
for GPUs only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)


class Attention(nn.Module):
    def __init__(self, sizes: Mapping[str, Any], gather: Gather | None) -> None:
        super().__init__()
        width, self.size, self.gather = sizes["width"], sizes["width"] // sizes["heads"], gather
        kv = self.size * sizes["kv_heads"]
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, kv, bias=False), nn.Linear(width, kv, bias=False)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for one in (self.query, self.key, self.value))
        cos, sin = turn
        q, k = (part * cos + torch.cat([-part.chunk(2, -1)[1], part.chunk(2, -1)[0]], -1) * sin for part in (q, k))
        if self.gather is not None:
            mixed = self.gather.attend(q, k, v)
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, sizes: Mapping[str, Any], gather: Gather | None) -> None:
        super().__init__()
        width = sizes["width"]
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.attention = Attention(sizes, gather)
        self.feed_forward = FeedForward(width, sizes["feed_forward"])

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Decoder(nn.Module):
    """The whole decoder, or what is left of it on a stage."""

    def __init__(self, sizes: Mapping[str, Any], gather: Gather | None = None) -> None:
        super().__init__()
        width, vocabulary, size = sizes["width"], sizes["vocabulary"], sizes["width"] // sizes["heads"]
        self.embedding: nn.Module | None = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleDict({str(n): Block(sizes, gather) for n in range(sizes["depth"])})
        self.norm: nn.Module | None = nn.RMSNorm(width, 1e-5)
        self.head: nn.Module | None = nn.Linear(width, vocabulary, bias=False)
        positions = torch.arange(sizes["sequence"]) if gather is None else gather.positions
        rates = 1e4 ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.outer(positions.double(), rates).repeat(1, 2)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            x = block(x, (self.cos, self.sin))
        return x if self.head is None or self.norm is None else self.head(self.norm(x))


# --- cuts ----------------------------------------------------------------------------------------------------------


class _GatherRanks(torch.autograd.Function):
    """[ranks, ...] of all ranks; gradients are summed and go back."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Any) -> Tensor:
        ctx.group = group
        made = own.new_empty(group.size() * len(own), *own.shape[1:])
        dist.all_gather_single(made, own.contiguous(), group=group)
        return made.view(group.size(), *own.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        made = torch.empty_like(gradients[0][0])
        dist.reduce_scatter_single(made, gradients[0].flatten(0, 1).contiguous(), group=ctx.group)
        return made, None


class Gather:
    """Attention of a rank that has the r-th chunk of 2 x ranks and the mirrored one: keys of all ranks at once."""

    def __init__(self, group: Any, length: int) -> None:
        self.group, self.half = group, length // (2 * group.size())
        chunks = torch.arange(length).split(self.half)
        self.own = [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(group.size())]
        self.positions = self.own[group.rank()]
        self.order = torch.cat(self.own).argsort()
        self.seen = [torch.arange(int(at[-1]) + 1) <= at[:, None] for at in self.positions.split(self.half)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = _GatherRanks.apply(torch.stack([key, value]), self.group)
        keys, values = torch.cat(parts.unbind(0), 3)[:, :, :, self.order]
        found = []
        for mask, rows in zip(self.seen, query.split(self.half, 2), strict=True):
            stop = mask.shape[1]
            grouped = {"enable_gqa": query.shape[1] != key.shape[1]}
            found.append(F.scaled_dot_product_attention(rows, keys[:, :, :stop], values[:, :, :stop], mask, **grouped))
        return torch.cat(found, 2)


def share_matrices(model: Decoder, mesh: DeviceMesh) -> None:
    """torchtitan's plan of its Llama."""
    ends = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, {name: one for name, one in ends.items() if getattr(model, name) is not None})
    for block in model.blocks.values():
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


class Degrees(NamedTuple):
    """Ranks of each kind; `reshard`: FSDP2 frees what it gathered for the forward pass."""

    pp: int
    dp: int
    cp: int
    tp: int
    reshard: bool


class Stock:
    """A decoder at work. Has state.

    Args:
        state: weights of the whole decoder.
        micro_batches: of a step, where there are stages.
        fast: options of AdamW.
    """

    def __init__(
        self,
        sizes: Mapping[str, Any],
        state: Mapping[str, Tensor],
        degrees: Degrees,
        micro_batches: int,
        rates: Mapping[str, Any],
    ) -> None:
        self.degrees = degrees
        shape = (degrees.pp, degrees.dp * degrees.cp, degrees.tp)
        self.mesh = init_device_mesh(
            "cpu", shape, mesh_dim_names=("pp", "fsdp", "tp"), backend_override=dict.fromkeys(range(3), "gloo")
        )
        if degrees.tp > 1 and degrees.dp > 1:
            self.mesh["fsdp", "tp"]._flatten()  # the norm of gradients is then one all-reduce
        self.gather = Gather(self.mesh.get_group("fsdp"), sizes["sequence"]) if degrees.cp > 1 else None
        self.model = Decoder(sizes, self.gather)
        self.model.load_state_dict({name: value for name, value in state.items() if name in self.model.state_dict()})
        self.stage = self.mesh.get_local_rank("pp")
        self._keep_stage(sizes["depth"])
        if degrees.tp > 1:
            share_matrices(self.model, self.mesh["tp"])
        if degrees.dp * degrees.cp > 1:
            for block in self.model.blocks.values():
                fully_shard(block, mesh=self.mesh["fsdp"], reshard_after_forward=degrees.reshard)
            fully_shard(self.model, mesh=self.mesh["fsdp"], reshard_after_forward=degrees.reshard)
        every = list(self.model.parameters())
        decay = rates["weight_decay"]
        groups = [
            {"params": [one for one in every if one.ndim >= 2], "weight_decay": decay},
            {"params": [one for one in every if one.ndim < 2], "weight_decay": 0.0},
        ]
        groups = [one for one in groups if one["params"]]
        self.optimizer = torch.optim.AdamW(
            groups, lr=rates["learning_rate"], betas=rates["betas"], eps=rates["epsilon"], fused=True
        )
        self.schedule = self._schedule(micro_batches) if degrees.pp > 1 else None

    def _keep_stage(self, depth: int) -> None:
        """Only the blocks of this stage, and the ends where they belong."""
        stages, model = self.degrees.pp, self.model
        first, last = depth * self.stage // stages, depth * (self.stage + 1) // stages
        for name in list(model.blocks):
            if not first <= int(name) < last:
                del model.blocks[name]
        if self.stage:
            model.embedding = None
        if self.stage < stages - 1:
            model.norm = model.head = None

    def _schedule(self, micro_batches: int) -> Schedule1F1B:
        group = self.mesh.get_group("pp")
        stage = PipelineStage(self.model, self.stage, self.degrees.pp, torch.device("cpu"), group=group)
        return Schedule1F1B(stage, micro_batches, loss_fn=self._loss)

    @staticmethod
    def _loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def _parallel(self) -> AbstractContextManager[Any]:
        return loss_parallel() if self.degrees.tp > 1 else nullcontext()

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """One step. Returns the mean loss of this rank's samples; of stages before the last none."""
        self.optimizer.zero_grad(set_to_none=True)
        with self._parallel():
            loss = self._pass(tokens, targets)
        self._clip()
        self.optimizer.step()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _pass(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        if self.schedule is None:
            loss = self._loss(self.model(tokens), targets)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        arguments = () if self.stage else (tokens,)
        if self.stage == self.degrees.pp - 1:
            self.schedule.step(*arguments, target=targets, losses=losses)
            return torch.stack([one.detach() for one in losses]).mean()
        self.schedule.step(*arguments)
        return None

    def _clip(self) -> None:
        """torchtitan's: one norm over all axes."""
        every = list(self.model.parameters())
        norm = nn.utils.get_total_norm([one.grad for one in every if one.grad is not None], foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if self.degrees.pp > 1:
            norm = norm**2
            dist.all_reduce(norm, group=self.mesh.get_group("pp"))
            norm = norm**0.5
        nn.utils.clip_grads_with_norm_(every, 1.0, norm, foreach=True)
