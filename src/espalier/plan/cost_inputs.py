"""What is priced: layouts of a request, on one kind of rank of a fleet. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, reduce
from operator import add
from typing import Any, ClassVar

import numpy as np

from espalier.plan import collective_time, device_model
from espalier.plan.axes import offload, optimizer_node
from espalier.plan.axes import offload_tiers as offload_cost
from espalier.plan.axes.experts import ExpertLoad, expected
from espalier.plan.axes.experts import cost as expert_cost
from espalier.plan.axes.flat_layout import BUCKET, Sized
from espalier.plan.axes.offload_layout import CHUNK, PAGE
from espalier.plan.axes.sequence import SequenceGrid, SequenceLoad, plainly
from espalier.plan.axes.sequence import cost as sequence_cost
from espalier.plan.axes.sharding import (
    Division,
    Lengths,
    StateBytes,
    StateSizes,
    Way,
    Wire,
    cost,
    lengths,
    passing,
    volumes,
)
from espalier.plan.axes.state_holders import fullest
from espalier.plan.axes.token_chunks import by_chunks, chunk_tokens
from espalier.plan.base import RESIDENT
from espalier.plan.collective_time import DeviceGroup, Fleet
from espalier.plan.layouts import Layouts
from espalier.plan.request import Request
from espalier.recipe import units
from espalier.recipe.cost import Anatomy, Carried, Cost, Cut, Number, Terms, uncoded

TURN = 3e-3
"""Seconds that each further rank on a core keeps a rank from it: what the scheduler gives at once. Four ranks on two
cores took 3 to 4 ms longer for each exchange in a layer (bench/cuts.py: tp4, pp2 x tp2 beside dp4, pp2 x dp2), on a
machine where other work ran; pairs of ranks that exchange nothing else did not show it. Provisional."""

MEETING = 80e-6
"""Seconds by which GPUs of several machines come late to an exchange that computation waits for. Assumed: 64 MiB on 128
ranks move at 42 to 48 GB/s (measurements that Buff's planner uses), which this makes of 52."""
EACH = 2**20
LARGEST = 2**29
"""Bytes of gradients exchanged at once for each rank that sums them, since a piece waits for a hop of each
(Megatron-Core takes a million gradients for each rank), and the most."""


CUDA_MEMORY = 0.95
"""Share of a GPU's memory to be used: the allocator's blocks do not fill the rest. AMSP's rule, 0.92 M - 2 GiB, was
made for cards of 80 GB: of one of 12 GB it takes a quarter before anything is held."""
CPU_MEMORY = 0.9


def limit(kind: DeviceGroup, request: Request) -> float:
    """Bytes that a rank of this kind may hold: what the device allows, or less on demand."""
    device = kind.table.device
    share = CUDA_MEMORY if device.kind == "cuda" else CPU_MEMORY
    usable = (share if request.system.headroom else 1.0) * device.memory / kind.setting.processes
    allowed = request.recipe.plan.memory
    return usable if allowed is None else min(usable, float(units.size(allowed, "plan.memory")))


@dataclass(frozen=True)
class CostInputs:
    """What a price is of: request, fleet, the kind of rank at hand, and layouts. `speed`: of this kind's ranks over the
    mean, where they share sequences in proportion to it. `resident_optimizer`: see `plan.axes.offload`. `stage`: that
    asked of where they are unequal; None: the fullest."""

    request: Request
    on: Fleet
    kind: DeviceGroup
    layouts: Layouts
    speed: Number = 1.0
    resident_optimizer: Number = 0.0
    stage: int | None = None
    chooses_chunks: ClassVar[bool] = True
    """Whether loss and feed-forward are computed by chunks of tokens where nobody asks for it."""

    def anatomy(self, size: Number) -> Anatomy:
        """The work of a micro-batch of `size` samples on one rank, by chunks of tokens where these are chosen."""
        whole = self.whole(size)
        loss, feed_forward = self.chunks(whole)
        return replace(whole, layer=by_chunks(whole.layer, feed_forward), rest=by_chunks(whole.rest, loss))

    def whole(self, size: Number) -> Anatomy:
        """The same with all tokens at once."""
        request = self.request
        return request.profile.anatomy(size, self.layouts.recompute, request.precision, self.cut)

    def chunks(self, whole: Anatomy) -> tuple[Number, Number]:
        """Tokens that the loss, and a layer's feed-forward, take at a time; 0: all. A loss that is scaled takes all;
        so do feed-forwards that are cut or compiled, or whose gradients are put off."""
        request = self.request
        layouts = self.layouts
        pin = self.request.pin
        loss = pin.loss_chunk
        feed_forward = pin.feed_forward_chunk
        ours = request.system.storage is None and not request.system.fsdp and request.offload.parameters == "device"
        chooses = self.chooses_chunks and ours and request.precision != "fp16"
        if chooses and None in (loss, feed_forward):
            room = min(limit(kind, request) for kind in self.on.kinds)
            if loss is None:
                loss = chunk_tokens(whole.rest, room)
            if feed_forward is None and not request.recipe.train.compile:
                plain = (layouts.tp == 1) & (layouts.schedule != "zero_bubble")
                feed_forward = chunk_tokens(whole.layer, room, plain)
        return (0 if loss is None else loss), (0 if feed_forward is None else feed_forward)

    @property
    def cut(self) -> Cut:
        layouts = self.layouts
        return Cut(layouts.tp, layouts.sp / self.speed, layouts.algorithm != "fsp", layouts.hp)

    @cached_property
    def storage(self) -> StateBytes:
        """Bytes per parameter. Under bf16 today's trainer (replicated) keeps fp32 parameters and a copy; a sharded one
        keeps bf16 parameters and the masters with the optimizer; a window of layers is fp32."""
        request = self.request
        layouts = self.layouts
        if request.system.storage is not None:
            return request.system.storage
        width = request.bytes_each
        low = request.low
        moments = self._moments
        if not low or offload.windowed(request.offload):
            return StateBytes(width, width, moments)
        plain = (layouts.optimizer == 1) & (layouts.tp == 1) & (layouts.sp == 1) & (layouts.pp == 1)
        return StateBytes(
            np.where(plain, width + low, low), np.where(plain, width, low), np.where(plain, 0, width) + moments
        )

    @property
    def _moments(self) -> float:
        request = self.request
        one_moment = request.profile.hidden if request.muon else 0
        return request.bytes_each * (2 * request.profile.trainable - one_moment) / max(1, request.profile.trainable)

    def frozen(self, rounds: Number = 1, wire: Wire | None = None) -> Cost:
        """What is not trained: bytes of weights under adapters as they are stored, else of whole parameters, of which
        there are no copies in low precision, wherever they wait. Blocks are sharded with the parameters and gathered
        with them, unless the model is cut."""
        request = self.request
        profile = self.request.profile
        layouts = self.layouts
        kind = "frozen"
        whole = profile.frozen
        if whole is None:
            each = request.bytes_each if request.system.storage is None else request.system.storage.params
            kind = "params"
            whole = each * (profile.parameters - profile.trainable) / layouts.tp / layouts.pp
        uncut = (np.asarray(layouts.tp) * layouts.pp == 1) & (request.expert_ranks == 1)
        shared = uncut & (layouts.params > 1) & (request.system.storage is None)
        away = request.offload.frozen != "device"
        if not (profile.untrained and (away or np.any(shared))):
            return Cost(memory_bytes={kind: whole})
        blocks = self._frozen_blocks
        states = StateSizes(
            storage=StateBytes(1, 0, 0),
            sizes=self._frozen_sizes,
            trained=False,
            fetched=away,
            elements=blocks.total(),
            layers=len(blocks),
            layer=max(blocks.values()),
            cut=~(shared | away),
            width=1,
        )
        division = replace(self.division, params=np.where(shared, layouts.params, 1))
        made = cost(states, division, rounds=rounds, wire=wire)
        part = made.memory_bytes["params"] - blocks.total()
        memory = {kind: whole + np.where(shared | away, part, 0.0), "gathered": made.memory_bytes["gathered"]}
        return replace(made, memory_bytes=memory)

    @property
    def _frozen_sizes(self) -> tuple[Sized, ...]:
        """The frozen tensors of blocks as they are stored: those of adapters' models as they say, others whole."""
        profile = self.request.profile
        whole = self.request.precision == "fp64" and self.request.profile.frozen is None
        return tuple(map(_fp64, profile.untrained) if whole else profile.untrained)

    @cached_property
    def _frozen_blocks(self) -> Counter[int | None]:
        """Bytes of these, by block."""
        blocks = Counter[int | None]()
        for sized in self._frozen_sizes:
            blocks[sized.block] += sized.elements * sized.element_bytes
        return blocks

    @property
    def cuda(self) -> bool:
        return self.kind.table.device.kind == "cuda"

    @property
    def issue(self) -> Number:
        """Seconds in which the host issues an operation."""
        return self.on.factors.issue * device_model.issue_seconds(self.kind.table.device)

    @property
    def stage_layers(self) -> Number:
        """Layers of the stage at hand."""
        if stages := self.request.system.stages:
            return max(stages) if self.stage is None else stages[self.stage]
        return -(-self.request.profile.layers // self.layouts.pp)

    @property
    def stage_parameters(self) -> Number:
        """Trainable parameters that a rank of the fullest stage updates, before sharding."""
        request = self.request
        pp = self.layouts.pp
        outside = request.profile.outside / np.where(pp == 1, 1, request.profile.tables)
        return (self.stage_layers * request.layer_parameters + outside) / self.layouts.tp

    @property
    def stream_bytes(self) -> Number:
        """Bytes of a value that goes from layer to layer. Under bf16 it is as precise as the parameters: these are
        rounded only where the optimizer keeps masters."""
        request = self.request
        if not request.low or request.system.storage is not None:
            return request.compute
        return np.where(self.layouts.optimizer > 1, request.low, request.bytes_each)

    @cached_property
    def bucket_bytes(self) -> Number:
        """Bytes of gradients exchanged at once: what was asked for, else more where many ranks sum them."""
        if (bucket := self.request.recipe.comm.bucket) != "auto":
            return units.size(bucket, "comm.bucket")
        ranks = self.layouts.shards // self.layouts.grads
        return np.clip(ranks * EACH, BUCKET, LARGEST)

    # --- what sharded states cost (see `plan.axes.sharding`)
    # -----------------------------------------------------------------

    @cached_property
    def states(self) -> StateSizes:
        """The model's states on a rank of the fullest stage."""
        request = self.request
        profile = self.request.profile
        layouts = self.layouts
        keeps = request.low and request.system.storage is None
        largest = max((rows * columns for rows, columns in profile.matrices), default=0) if request.muon else 0
        crossing = request.crossings.get("gradients")
        sizes = profile.sizes if request.system.storage is None and request.expert_ranks == 1 else ()
        if request.precision == "fp64":
            sizes = tuple(map(_fp64, sizes))
        return StateSizes(
            storage=self.storage,
            exact=StateBytes(request.bytes_each, request.bytes_each, self._moments) if keeps else None,
            sizes=sizes,
            whole=request.muon,
            elements=self.stage_parameters,
            layers=self.stage_layers,
            layer=request.layer_parameters / layouts.tp,
            outside=profile.outside / np.where(layouts.pp == 1, 1, profile.tables) / layouts.tp,
            table=profile.outside / max(1, profile.tables) / layouts.tp,
            tied=(profile.tables == 1) * (layouts.pp == 1),
            cut=(layouts.tp > 1) | (layouts.pp > 1),
            largest=largest / layouts.tp,
            width=request.bytes_each,
            bucket_bytes=self.bucket_bytes,
            lossy=crossing.level if crossing is not None and crossing.lossy else "",
        )

    @cached_property
    def parts(self) -> Sequence[tuple[StateSizes, Division]]:
        """The states by who holds them, and over which ranks: experts that are spread lie on fewer than all the rest.
        Under Muon matrices have one moment."""
        request = self.request
        profile = self.request.profile
        ep = self.request.expert_ranks
        if ep == 1:
            return ((self.states, self.division),)
        layouts = self.layouts
        states = self.states
        source = request.experts.tensors
        every = profile.layers * request.experts.parameters
        layer = request.experts.on_rank(ep) / layouts.tp
        spread = self.stage_layers * layer
        matrices = (profile.hidden - every) / (profile.trainable - every)
        parts = []
        both = (
            (False, matrices, (states.elements - spread, states.layer - layer, states.outside), self.division),
            (True, 1.0, (spread, layer, 0), self.division.of_experts(ep)),
        )
        for of_experts, hidden, (elements, of_layer, outside), division in both:
            more = request.muon * request.bytes_each * (profile.hidden / profile.trainable - hidden)
            kind = ep, of_experts, request.muon, request.precision == "fp64"
            part = replace(
                states,
                storage=states.storage._replace(optimizer=states.storage.optimizer + more),
                exact=states.exact and states.exact._replace(optimizer=states.exact.optimizer + more),
                elements=elements,
                layer=of_layer,
                outside=outside,
                table=0 if of_experts else states.table,
                tensors=source and partial(_on_rank, source, kind),
                cuts=(layouts.pp, layouts.chunks, layouts.tp),
                cut=False,
            )
            parts.append((part, division))
        return parts

    @property
    def owned(self) -> Number:
        """Parameters that a rank's optimizer moves."""
        return sum(states.elements / division.optimizer for states, division in self.parts)

    @property
    def matrix_bytes(self) -> Number:
        """Bytes of the matrices that a rank's Muon moves: tensor ranks send their parts to the ranks that take whole
        ones, and get them back."""
        profile = self.request.profile
        return self.request.bytes_each * self.owned * profile.hidden / max(1, profile.trainable)

    def experts(self, samples: Number, rounds: Number) -> Cost:
        """What tokens for other ranks' experts cost in a step, where experts are spread."""
        request = self.request
        layouts = self.layouts
        few, over = divmod(request.experts.total, request.expert_ranks)
        sizes = [few + (rank < over) for rank in range(request.expert_ranks)]
        int8 = request.recipe.comm.experts == "int8"
        in_turn = request.system.storage is not None
        load = ExpertLoad(request.profile.width, request.compute, int8, in_turn)
        tokens = samples * request.profile.tokens_per_sample / layouts.sp / rounds
        again = float(layouts.recompute != "none")
        layer = expert_cost(load, expected(tokens, request.experts.active, sizes), self.wire, again, layouts.tp)
        return layer.times(rounds * self.stage_layers)

    @cached_property
    def division(self) -> Division:
        """Over how many ranks each state is split. On processors exchanges go through machines first, where these have
        as many ranks each; NCCL finds its way by itself."""
        layouts = self.layouts
        on = self.on
        equal = on.ranks == on.nodes * on.per_node
        machine = None if self.cuda or on.between is None else (on.per_node if equal else 1) // layouts.tp
        return Division(layouts.params, layouts.grads, layouts.optimizer, layouts.shards, layouts.tp, machine)

    def wire(self, operation: Any, size: Number, ranks: Number, stride: Number, traffic: str) -> Number:
        """Seconds of a collective, encoded as its class is."""
        on = self.on
        if (crossing := self.request.crossings.get(traffic)) is not None:
            stored = {"gradients": self.storage.grads, "parameters": self.storage.params}
            storage = stored.get(traffic, float(self.request.compute))
            on = collective_time.encoded(on, crossing, float(np.min(storage)))
        return collective_time.seconds(operation, size, ranks, stride, on)

    def carried(self, traffic: str) -> Carried:
        """What leaves a rank of a class of traffic, encoded on links of its codec's level."""
        crossing = self.request.crossings.get(traffic)
        if crossing is None:
            return uncoded
        everywhere = crossing.level == "all"
        per_node = np.inf if self.on.between is None else self.on.per_node

        def sent(operation: str, size: Number, ranks: Number, stride: Number, width: Number) -> Number:
            coded = Way(crossing.codec, int(ranks), float(width)).sent(operation, np.rint(size / width))
            return coded if everywhere or ranks * stride > per_node else uncoded(operation, size, ranks, stride, width)

        return sent

    def awaited(self, operation: Any, size: Number, ranks: Number, stride: Number, traffic: str) -> Number:
        """Seconds of a collective amid a layer's computation: where ranks share cores, each of its ranks waits for a
        core in turn; GPUs of several machines wait for the last one to come (`MEETING`)."""
        taken = self.wire(operation, size, ranks, stride, traffic)
        if not self.cuda:
            turns = TURN * (1 / self.kind.setting.share - 1)
            return taken + np.where(taken > 0, turns, 0.0)
        apart = (ranks * stride > self.on.per_node) & (self.on.between is not None)
        return taken + np.where(apart & (taken > 0), self.on.factors.call * MEETING, 0.0)

    def sequence(self, tokens: Number, attention: Number = 0.0, coded: bool = False) -> Cost:
        """What ranks that share a sequence exchange in one layer of a micro-batch of `tokens` tokens of each rank.
        `attention`: seconds of one rank's attention forward, which may hide it. `coded`: in bytes as they are encoded
        (of one layout)."""
        profile = self.request.profile
        layouts = self.layouts
        load = SequenceLoad(
            tokens=tokens * layouts.sp / self.speed,
            heads=profile.heads / layouts.tp,
            kv_heads=np.maximum(1, profile.kv_heads / layouts.tp),
            head_size=profile.kv_width / profile.kv_heads,
            element_bytes=self.request.compute,
            seconds=attention,
            recompute=layouts.recompute,
        )
        grid = SequenceGrid(
            heads=layouts.hp,
            context=layouts.cp,
            window=layouts.window,
            head_first=layouts.placement == "head_first",
            stride=layouts.tp,
            apart=2 if layouts.placement == "interleaved" else 1,
        )
        return sequence_cost(load, grid, self.awaited, self.carried if coded else plainly)

    @cached_property
    def sharded(self) -> Terms:
        """Bytes of sharded states by kind, wherever they are."""
        return self.states_cost().memory_bytes

    @cached_property
    def waiting(self) -> Terms:
        """Bytes of sharded states that wait outside the device, by kind."""
        waiting = offload.waiting(self.request.offload, self.sharded)
        if self.request.offload.parameters in ("host", "disk"):  # each rank has a share of all that it would hold
            shares = [(cost(*part).memory_bytes, part[1].ranks) for part in self.parts]
            waiting = {kind: sum(sizes[kind] / ranks for sizes, ranks in shares) for kind in waiting}
        if self.request.offload.activations != "device":
            each = -(-self.request.profile.global_batch // self.layouts.dp)
            size = np.minimum(np.maximum(1, self.layouts.micro_batch), each)
            rounds = -(-each // size) if offload.windowed(self.request.offload) else 1  # layer by layer
            saved = self.anatomy(size).layer.saved
            waiting["activations"] = rounds * offload_cost.activations(saved, self.stage_layers)
        if self.request.offload.frozen != "device":
            outside = (self.request.profile.frozen or 0) - self._frozen_blocks.total()
            waiting["frozen"] = self.frozen().memory_bytes["frozen"] - outside
        if "optimizer" in waiting:
            waiting["optimizer"] = waiting["optimizer"] - self.resident_optimizer
        return waiting

    def lacking(self, over: Number) -> Number:
        """Bytes that a rank and its machine lack, where the device has `over` too many."""
        return offload.lacking(over, self.waiting, self.kind, self.request)

    @property
    def _resident(self) -> Terms:
        """Bytes of sharded states by kind, without those that wait."""
        way = self.request.offload
        sizes = self.sharded
        if offload.windowed(way):
            sizes = {name: 0.0 * size for name, size in sizes.items()}
            sizes["window"] = optimizer_node.window_bytes(self.request) + sizes["params"]
        if way == offload.NODE:
            return sizes
        extent: Number = CHUNK
        if layers := self._window_layers:
            ahead = optimizer_node.WINDOW - 1
            sizes = {**sizes, "gathered": _largest((ranks > 1) * ahead * size / ranks for size, ranks in layers)}
            rows = len(offload_cost.STATES) + 1  # two moments
            extent = _largest(rows * PAGE * np.ceil(size / ranks / PAGE) for size, ranks in layers)
        resident = offload.resident(self.waiting, sizes, extent)
        return {**resident, "optimizer": resident["optimizer"] + self.resident_optimizer}

    @property
    def _window_layers(self) -> Sequence[tuple[float, Number]]:
        """(bytes, ranks that have a share each) of a table, a layer, and its experts where they are spread; empty: no
        window of layers comes from host memory or disk."""
        request = self.request
        dp = self.layouts.dp
        ep = self.request.expert_ranks
        if request.offload.parameters not in ("host", "disk"):
            return ()
        experts = request.experts.on_rank(ep) if ep > 1 else 0.0
        table = request.profile.outside / max(1, request.profile.tables)
        sizes = (table, dp), (request.layer_parameters - experts, dp), (experts, np.maximum(1, dp // ep))
        return [(request.bytes_each * size, ranks) for size, ranks in sizes]

    @property
    def gathering(self) -> Number:
        """Bytes of what all ranks have read of a layer, while it goes into the window."""
        return _largest((ranks > 1) * size for size, ranks in self._window_layers)

    @cached_property
    def device_states(self) -> Terms:
        """Bytes of sharded states on a rank by kind, with what rounds keep beside them."""
        sizes = self._resident if self.request.offload != RESIDENT else self.states_cost().memory_bytes
        if not self.request.outer:
            return sizes
        moved = sum(
            sum(volume.elements for volume in volumes(states, division)) / division.optimizer
            for states, division in self.parts
        )
        return {**sizes, "outer": self.request.outer * self.request.bytes_each * moved}

    @cached_property
    def passing(self) -> Mapping[str, tuple[Number, Number]]:
        """Bytes of gathered parameters and of gradients beside the states (see `plan.axes.sharding.passing`)."""
        parts = [passing(*part, not self.cuda) for part in self.parts]
        return {
            moment: (sum(part[moment][0] for part in parts), sum(part[moment][1] for part in parts))
            for moment in parts[0]
        }

    @cached_property
    def exchanged(self) -> Cost:
        """What a step of one micro-batch exchanges."""
        return self.states_cost(wire=self.wire)

    def gathered(self, price: Callable[[Number, Division], Number]) -> Number:
        """The `price` of bringing all parameters to every rank that computes with them, where each has a share:
        given the bytes of each part and who shares it."""
        return sum(price(cost(*part).memory_bytes["params"], part[1]) for part in self.parts)

    def states_cost(self, rounds: Number = 1, wire: Wire | None = None) -> Cost:
        """What the sharded states of all parts add to a step (see `plan.axes.sharding.cost`), with gathers of what is
        frozen."""
        parts = (cost(*part, rounds=rounds, wire=wire) for part in self.parts)
        return reduce(add, parts, replace(self.frozen(rounds, wire), memory_bytes={}))


def _largest(sizes: Iterable[Number]) -> Number:
    return reduce(np.maximum, sizes, 0.0)


@lru_cache(maxsize=1024)
def _on_rank(
    source: Callable[[int], Sequence[Sized]], kind: tuple[int, bool, bool, bool], pp: int, chunks: int, tp: int
) -> Lengths:
    """Of the fullest rank; `kind`: ranks of an expert group, of experts or all others, under Muon, in fp64."""
    ep, experts, muon, fp64 = kind
    tensors = [tensor for tensor in _fullest(source, tp, ep, pp, chunks) if bool(tensor.experts) == experts]
    return lengths(tuple(_fp64(tensor) if fp64 else tensor for tensor in tensors), muon)


_fullest = lru_cache(maxsize=256)(lambda source, tp, *cuts: fullest(source(tp), *cuts))


def _fp64(tensor: Sized) -> Sized:
    # In other precisions the trainer keeps fp32 masters.
    return tensor._replace(element_bytes=8, kind=("torch.float64", False))
