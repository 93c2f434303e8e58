"""The plan file: which rank holds, computes and sends what, what it should cost, and why. Data only; no torch.

A plan can say unequal pipelines, ring placement, expert maps and unequal shares; what else a system decides is in
`choices`. `layout` is the shorthand people read, derived from the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from espalier.plan.axes.flat_layout import BUCKET
from espalier.recipe import serialization
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import parsing
from espalier.recipe.serialization import Value

if TYPE_CHECKING:
    from espalier.track.charts import TimetableBar

Placement = Literal["head_first", "context_first", "interleaved"]
Tier = Literal["device", "host", "disk", "node"]
"""Where bytes wait: in the memory that computes, in the machine's memory, on its disk, or on optimizer nodes."""


TOTALS = 3
TOTAL_BYTES = 8
"""Loss, weight and stop flag: with a flag per rank they are what an agreement adds up at every step, in float64."""


def task_totals(tasks: int) -> int:
    """What joins them where there are several tasks: loss and weight of each."""
    return 2 * tasks if tasks > 1 else 0


class PlanStruct(Value, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=False):
    """Base of all plan structs."""


class Rank(PlanStruct, frozen=True):
    """One process: its role, its device, and its share of each global batch: samples `[start, stop)`.

    `layers`: of a rank with the role `optimizer`, the layers `[first, last)` whose parameters and optimizer states it
    holds for all trainers; the embedding is with the first layer, the head with the last.
    """

    role: Literal["trainer", "optimizer", "aggregator", "standby", "evaluator", "spare"] = "trainer"
    device: str = "cpu"
    node: int = 0
    threads: int = 1
    share: tuple[int, int] = (0, 0)
    layers: tuple[int, int] = (0, 0)

    @property
    def samples(self) -> int:
        """How many of a step are its own."""
        return self.share[1] - self.share[0]


class Unit(PlanStruct, frozen=True):
    """A group of parameters placed together: those whose names match `pattern` and no earlier unit's.

    Each list names the ranks over which that state is split, of the group that holds rank 0 (the others are alike); an
    empty list means every trainer rank holds all of it. `whole`: matrices that the optimizer moves as a whole stay on
    one rank each.
    """

    pattern: str = "*"
    params: tuple[int, ...] = ()
    grads: tuple[int, ...] = ()
    optimizer: tuple[int, ...] = ()
    whole: bool = False


class Stage(PlanStruct, frozen=True):
    """One stage of one pipeline: its ranks, and its layers `[first, last)`. With several chunks (`Plan.interleave`) a
    rank holds several stages.

    Attributes:
        tensor: ranks that share each matrix; they are consecutive.
        heads: ranks that share the attention heads of a sequence (Ulysses).
        context: ranks that share the tokens of a sequence (ring attention), in inner rings of `window` ranks.
        speeds: relative ones of the ranks that share a sequence, in the order of `ranks`: tokens and heads are in
            proportion; empty: equal.
    """

    pipeline: int = 0
    ranks: tuple[int, ...] = ()
    layers: tuple[int, int] = (0, 0)
    micro_batches: int = 1
    tensor: int = 1
    heads: int = 1
    context: int = 1
    window: int = 1
    speeds: tuple[float, ...] = ()

    @property
    def sequence(self) -> int:
        """Ranks that share a sequence."""
        return self.heads * self.context


class HaloRows(PlanStruct, frozen=True):
    """Which rows of a cut graph: those that `layer` reads, or (`backward`) their gradients.

    Attributes:
        nodes: from which machine to which; empty: between all.
    """

    layer: int
    backward: bool
    nodes: tuple[tuple[int, int], ...] = ()


class Exchange(PlanStruct, frozen=True):
    """How one class of traffic crosses one level of links. `rows`: of halos, which; None: all."""

    traffic: str
    level: Literal["inside", "between", "all"] = "all"
    codec: str = "exact"
    agreement: str = "every_step"
    rows: HaloRows | None = None


class Offload(PlanStruct, frozen=True):
    """Where states, activations and frozen weights wait between uses: see `mechanisms.offload`."""

    optimizer: Tier = "device"
    parameters: Tier = "device"
    activations: Tier = "device"
    frozen: Tier = "device"

    def __str__(self) -> str:
        """In a few words; empty: nothing waits elsewhere."""
        away = [(name, getattr(self, name)) for name in self.__struct_fields__ if getattr(self, name) != "device"]
        return ", ".join(f"{name} on {tier}" for name, tier in away)


RESIDENT = Offload()


class ChoiceState(PlanStruct, frozen=True):
    """What one system says in a plan. The system declares it in `state.py` of its folder, as `STATE`."""

    name: ClassVar[str] = ""
    apart: ClassVar[bool] = False
    """Whether each rank holds parts of its own, and counts the losses that it has computed."""

    @property
    def exchanged(self) -> str:
        """What its ranks exchange in every micro-batch, of which all then need as many, in words; empty: nothing."""
        return ""

    @property
    def layout(self) -> dict[str, Any]:
        """What the plan's `Layout` has otherwise."""
        return {}

    @property
    def cuts(self) -> Iterable[str]:
        """What tells the work of its ranks from that of another plan's."""
        return ()

    def spans(self) -> list[TimetableBar]:
        """The passes of a step, where they do not follow from the plan's stages."""
        return []

    def cells(self, plan: Plan, origin: str) -> list[Cell]:
        """The plan's cells, where they do not follow from its stages. Raises UserError for nonsense in the state."""
        return []


class RoundsState(ChoiceState, frozen=True):
    """Replicas that agree round by round: which ranks make each, and how they do.

    Attributes:
        replicas: ranks of each, in order of rank; within one the plan's units hold. Empty: all agree at every step.
        method: a key of `optim.diloco_slowmo.METHODS`; settings: what of its `OuterMethod` was set otherwise.
        steps: local steps of a round of the fastest replica.
        paces: of each replica, its steps for each of the fastest.
    """

    replicas: tuple[tuple[int, ...], ...] = ()
    method: str = "co2"
    settings: dict[str, float | str | bool] = msgspec.field(default_factory=dict)
    steps: int = 1
    paces: tuple[float, ...] = ()


State = TypeVar("State", bound=ChoiceState)
Cell = tuple[tuple[int, int], tuple[int, ...]]
"""A share of the batch, and the ranks that compute it together."""


class AdaptiveRule(PlanStruct, frozen=True):
    """A value that may change while running: where it starts, its bounds, and the signal that moves it."""

    name: str
    start: float
    low: float
    high: float
    signal: str


class Layout(PlanStruct, frozen=True):
    """The shorthand: degrees of parallelism, sharding factors (numbers of ranks), and the shape of a step."""

    dp: int = 1
    tp: int = 1
    sp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    window: int = 1
    placement: Placement = "head_first"
    schedule: str = "1f1b"
    interleave: int = 1
    waves: int = 0
    algorithm: str = "data"
    shard: dict[str, int] = msgspec.field(default_factory=lambda: {"params": 1, "grads": 1, "optimizer": 1})
    micro_batch: int = 1
    accumulate: int = 1
    recompute: str = "none"
    precision: str = "fp32"

    @property
    def heads(self) -> int:
        """Ranks that share the heads of a sequence: `sp / cp`."""
        return self.sp // self.cp

    @property
    def cut(self) -> tuple[str, ...]:
        """How the model is cut, in a few words; empty: every rank has all of it."""
        parts = (
            (self.tp > 1, f"{self.algorithm} tp {self.tp}"),
            (self.heads > 1, f"heads {self.heads}"),
            (self.cp > 1, f"context {self.cp}"),
            (1 < self.window < self.cp, f"window {self.window}"),
            (self.placement != "head_first", self.placement.replace("_", " ")),
            (self.ep > 1, f"ep {self.ep}"),
            (self.pp > 1, f"pp {self.pp}"),
            (self.schedule != "1f1b", self.schedule),
            (self.waves > 0, f"waves {self.waves}"),
            (self.interleave > 1, f"interleave {self.interleave}"),
        )
        return tuple(words for holds, words in parts if holds)

    @property
    def split(self) -> tuple[str, ...]:
        """How states are split, in a few words; empty: not at all."""
        shard = "/".join(str(self.shard.get(name, 1)) for name in ("params", "grads", "optimizer"))
        return (f"shard {shard}",) * (shard != "1/1/1")

    def __str__(self) -> str:
        parts = [f"dp {self.dp}", *self.cut, *self.split, f"micro-batch {self.micro_batch}"]
        return ", ".join(parts + [f"recompute {self.recompute}"] * (self.recompute != "none"))


class Predicted(PlanStruct, frozen=True):
    """What the plan should cost on its slowest rank. Seconds, bytes, tokens; `terms` sum to `step_seconds`."""

    step_seconds: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float
    terms: dict[str, float]
    memory_bytes: dict[str, float]
    """By kind, with their sum at the worst moment under `peak`."""
    memory_limit: float
    sent_bytes: dict[str, float]
    """Payload bytes each rank sends per step, by traffic class (the ledger's figure)."""
    waiting_bytes: dict[str, float] = msgspec.field(default_factory=dict)
    """By kind, outside the device: see `Plan.offload`."""
    spread: float = 0.0
    """Relative error to expect of `step_seconds`: four of five measurements should lie within; 0: not known."""
    watts: float = 0.0
    """Of all devices at their limit of power; 0 where one is not known."""
    price_per_hour: float = 0.0
    """Of all machines, in the currency of the cluster file; 0 where one has none."""
    sources: dict[str, str] = msgspec.field(default_factory=dict)
    """Term or coefficient -> formula or where the number comes from."""

    @property
    def state_bytes(self) -> dict[str, float]:
        """Bytes of parameters and of optimizer states, wherever they are."""
        resident = self.memory_bytes
        away = self.waiting_bytes
        return {kind: resident.get(kind, 0.0) + away.get(kind, 0.0) for kind in ("params", "optimizer")}

    def longer(self, term: str, seconds: float) -> Predicted:
        """A step that takes so many seconds more, for what `term` names."""
        return self.taking(self.step_seconds + seconds, **{term: seconds})

    def taking(self, step: float, **terms: float) -> Predicted:
        """The same work in a step of so many seconds, with these terms."""
        share = self.step_seconds / step
        return self.changed(
            step_seconds=step,
            tokens_per_second=self.tokens_per_second * share,
            tokens_per_second_per_device=self.tokens_per_second_per_device * share,
            mfu=self.mfu * share,
            terms=self.terms | terms,
        )


class RunnerUp(PlanStruct, frozen=True):
    """A plan not taken, and what it loses."""

    layout: Layout
    ranks: int
    threads: int
    step_seconds: float
    peak_bytes: float
    loses: str


class Plan(PlanStruct, frozen=True):
    """Every decision about one run."""

    version: Literal[3] = 3
    planner: str = "search"
    ranks: tuple[Rank, ...] = (Rank(),)
    units: tuple[Unit, ...] = (Unit(),)
    stages: tuple[Stage, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    rules: tuple[AdaptiveRule, ...] = ()
    algorithm: str = "data"
    """What tensor and sequence ranks do: see `plan.layouts.ALGORITHMS`."""
    placement: Placement = "head_first"
    """Which of the ranks that share a sequence are neighbours: see `parallel.mesh`."""
    schedule: str = "1f1b"
    """The order of forward and backward passes where there are several stages."""
    interleave: int = 1
    """Stages of one pipeline that each of its ranks holds."""
    prefetch: Literal["block", "attention", "none"] = "block"
    """From when on the sharded parameters of the next block are gathered: see `mechanisms.sharding.gather_hooks`."""
    bucket: int = BUCKET
    """Bytes of gradients exchanged at once where parameters are not gathered by blocks."""
    offload: Offload = RESIDENT
    choices: dict[str, Any] = msgspec.field(default_factory=dict)
    """What single systems say of themselves, each in a `ChoiceState` of its own, by their names in `plan.choice`."""
    micro_batch: int = 1
    recompute: str = "none"
    precision: str = "fp32"
    compile: bool = False
    predicted: Predicted | None = None
    executable: bool = True
    """Whether it fits; `missing`: what it lacks."""
    missing: str = ""
    why: tuple[str, ...] = ()
    runners_up: tuple[RunnerUp, ...] = ()

    def state(self, kind: type[State]) -> State:
        """What the system whose state is of `kind` says; where the plan does not hold it, what it says by itself."""
        states = (state for state in self.choices.values() if isinstance(state, kind))
        return next(states, None) or kind()

    def with_state(self, state: ChoiceState) -> Plan:
        """The plan with what a system says."""
        return self.changed(choices={**self.choices, state.name: state})

    @property
    def trainers(self) -> tuple[int, ...]:
        """Indices of the ranks that compute the loss."""
        return tuple(index for index, rank in enumerate(self.ranks) if rank.role == "trainer")

    @property
    def trainer_ranks(self) -> list[Rank]:
        """The ranks that compute the loss."""
        return [rank for rank in self.ranks if rank.role == "trainer"]

    @property
    def optimizer_nodes(self) -> list[Rank]:
        """The ranks that hold the model for the others."""
        return [rank for rank in self.ranks if rank.role == "optimizer"]

    @property
    def pipelines(self) -> dict[int, list[Stage]]:
        """The stages of each pipeline, in the order of their layers."""
        pipelines: dict[int, list[Stage]] = {}
        for stage in sorted(self.stages, key=lambda stage: (stage.pipeline, stage.layers)):
            pipelines.setdefault(stage.pipeline, []).append(stage)
        return pipelines

    @property
    def step_seconds(self) -> float:
        """Of a step, as predicted; 0 where nothing is."""
        return self.predicted.step_seconds if self.predicted is not None else 0.0

    @property
    def staged(self) -> bool:
        """Whether messages of GPUs go through host memory, as NCCL has no way for them: some ranks compute on
        processors, or share a GPU."""
        trainers = self.trainer_ranks
        on_gpus = [(rank.node, rank.device) for rank in trainers if rank.device != "cpu"]
        return 0 < len(on_gpus) < len(trainers) or len(set(on_gpus)) < len(on_gpus)

    @property
    def unequal(self) -> bool:
        """Whether its pipelines are cut at different layers, or share matrices over unequal numbers of ranks."""
        cuts: dict[int, set[tuple[int, int, int]]] = {}
        for stage in self.stages:
            cuts.setdefault(stage.pipeline, set()).add((*stage.layers, stage.tensor))
        return any(cut != cuts[min(cuts)] for cut in cuts.values())

    @property
    def apart(self) -> bool:
        """Whether each rank holds parts of its own: see `ChoiceState.apart`."""
        return any(state.apart for state in self.choices.values())

    @property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each replica that agrees with the others by rounds; empty: all agree at every step."""
        return self.state(RoundsState).replicas

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all states."""
        return all(len(unit.optimizer) <= 1 for unit in self.units)

    @property
    def exchanged(self) -> str:
        """What ranks exchange in every micro-batch, in words; empty: nothing."""
        states = " and ".join(filter(None, (state.exchanged for state in self.choices.values())))
        return states or "sharded gradients" * any(len(unit.grads) > 1 for unit in self.units)

    @property
    def rounds(self) -> int | None:
        """Micro-batches of every rank where all must have as many: something is exchanged in each."""
        if not self.exchanged:
            return None
        return max(-(-rank.samples // self.micro_batch) for rank in self.trainer_ranks)

    @property
    def layout(self) -> Layout:
        """The shorthand view of this plan."""
        trainers = self.trainers
        unit = self.units[0]
        first = self.ranks[trainers[0]]
        stages = [stage for stage in self.stages if stage.pipeline == 0] or [Stage(ranks=trainers)]
        stage = stages[0]
        copies = len(self.replicas) if self.replicas and stage.ranks else 1
        layout = Layout(
            dp=copies * len(stage.ranks or trainers) // (stage.tensor * stage.sequence),
            tp=stage.tensor,
            sp=stage.sequence,
            pp=len({stage.layers for stage in stages}) // self.interleave,
            cp=stage.context,
            window=stage.window,
            placement=self.placement,
            schedule=self.schedule,
            interleave=self.interleave,
            algorithm=self.algorithm,
            shard={
                "params": len(unit.params) or 1,
                "grads": len(unit.grads) or 1,
                "optimizer": len(unit.optimizer) or 1,
            },
            micro_batch=self.micro_batch,
            accumulate=max(1, -(-first.samples // self.micro_batch)),
            recompute=self.recompute,
            precision=self.precision,
        )
        for state in self.choices.values():
            layout = layout.changed(**state.layout)
        return layout


def dumps(plan: Plan, **others: Plan | dict[str, str]) -> str:
    """The plan as indented JSON with its derived `layout`; equal plans give equal text. `others`: more, by name."""
    tables = {
        name: {**msgspec.to_builtins(value), "layout": msgspec.to_builtins(value.layout)}
        if isinstance(value, Plan)
        else value
        for name, value in {"": plan, **others}.items()
    }
    table = tables.pop("") | tables
    return msgspec.json.format(msgspec.json.encode(table, order="deterministic"), indent=2).decode() + "\n"


def loads(text: str | bytes, origin: str = "plan.json") -> Plan:
    """The plan in `text`. Raises UserError naming the field at fault."""
    with parsing(origin, f"delete {origin}; it is then planned again"):
        table = serialization.from_json(text)
        if isinstance(table, dict):
            table = {key: value for key, value in table.items() if key not in ("layout", "what_if")}
        plan = msgspec.convert(table, Plan)
        return plan.changed(choices=_states(plan.choices)) if plan.choices else plan


def _states(choices: dict[str, Any]) -> dict[str, Any]:
    """Tables of a plan file as the structs of their systems."""
    known = import_module("espalier.plan.choice").TABLE
    if strangers := ", ".join(choices.keys() - known.keys()):
        raise msgspec.ValidationError(f"Object contains unknown field `{strangers}` - at `$.choices`")
    return {name: msgspec.convert(table, known[name].state) for name, table in choices.items()}


def check(plan: Plan, samples: int, origin: str = "plan.json") -> Plan:
    """`plan`, if its ranks divide a batch of `samples` among them. Raises UserError saying what is wrong with it."""
    at = 0
    for first, cell in _cells(plan, origin):
        start, stop = first
        if start != at or stop <= start:
            raise nonsense(origin, f"rank {cell[0]} has samples {start} to {stop}; the rank before it ends at {at}")
        at = stop
    if at != samples or plan.micro_batch < 1:
        raise nonsense(origin, f"its ranks share {at} samples in micro-batches of {plan.micro_batch}, not {samples}")
    if any(rank.threads < 1 for rank in plan.ranks):
        raise nonsense(origin, "a rank has no thread")
    fewest = min(rank.samples for rank in plan.trainer_ranks)
    if plan.rounds is not None and fewest < plan.rounds:
        few = f"a rank has {fewest} samples for {plan.rounds} micro-batches"
        raise nonsense(origin, f"{few}; with {plan.exchanged} every rank needs one for each")
    return plan


def _cells(plan: Plan, origin: str) -> list[Cell]:
    """(share, ranks) of each data coordinate: the ranks of a tensor or sequence group have the same samples, and so has
    their like in every stage of a pipeline. Raises UserError where they have not."""
    apart = [cell for state in plan.choices.values() for cell in state.cells(plan, origin)]
    if apart:
        return apart
    if plan.replicas or not plan.stages:
        return [(plan.ranks[index].share, (index,)) for index in plan.trainers]
    if sorted(rank for stage in plan.stages for rank in stage.ranks) != sorted(plan.trainers * plan.interleave):
        times = "once" if plan.interleave == 1 else f"{plan.interleave} times"
        raise nonsense(origin, f"its stages do not hold every trainer {times}")
    for stage in plan.stages:
        _check_stage(plan, stage, origin)
    shared_cells = []
    for number in sorted({stage.pipeline for stage in plan.stages}):
        columns: list[tuple[int, ...]] = []
        for stage in (stage for stage in plan.stages if stage.pipeline == number):
            width = stage.tensor * stage.sequence
            cells = [stage.ranks[first : first + width] for first in range(0, len(stage.ranks), width)]
            if columns and len(columns) != len(cells):
                raise nonsense(origin, f"stages of pipeline {number} have {len(columns)} and {len(cells)} replicas")
            columns = [(*a, *b) for a, b in zip(columns, cells, strict=True)] if columns else cells
        for cell in columns:
            shares = {plan.ranks[index].share for index in cell}
            if len(shares) > 1:
                listed = " and ".join(f"{start} to {stop}" for start, stop in sorted(shares))
                raise nonsense(origin, f"ranks {cell[0]} to {cell[-1]} compute one sample together and have {listed}")
            shared_cells.append((shares.pop(), cell))
    return shared_cells


def _check_stage(plan: Plan, stage: Stage, origin: str) -> None:
    """Raises UserError where the degrees of a stage do not divide what they cut."""
    width = stage.tensor * stage.sequence
    if min(stage.tensor, stage.heads, stage.context, stage.window) < 1 or len(stage.ranks) % width:
        why = f"tensor {stage.tensor} x heads {stage.heads} x context {stage.context} does not divide the stage's "
        raise nonsense(origin, f"{why}{len(stage.ranks)} ranks")
    if stage.speeds and (len(stage.speeds) != stage.sequence or not 0 < min(stage.speeds) <= max(stage.speeds) < inf):
        words = f"{len(stage.speeds)} speeds, the lowest {min(stage.speeds):g}"
        raise nonsense(origin, f"a stage has {words}, for {stage.sequence} ranks that share a sequence")
    rings = stage.window * (2 if plan.placement == "interleaved" and stage.context > 1 else 1)
    if stage.context % rings:
        raise nonsense(origin, f"inner rings of {stage.window} ranks do not divide a context of {stage.context} ranks")


def nonsense(origin: str, why: str) -> UserError:
    """The error for a plan that cannot be run."""
    return UserError(f"{origin} cannot be run: {why}.", do=f"delete {origin}; it is then planned again")


def read(path: str | Path) -> Plan:
    """The plan in file `path`."""
    with parsing(path, "espalier plan recipe.toml --json > plan.json"):
        return loads(Path(path).read_bytes(), str(path))
