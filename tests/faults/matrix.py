"""The fault matrix as data: which mechanisms are struck, by which signals, at which moments, and what cannot be equal.

A row is one run of a subject in which every moment is struck once, each by the next signal. With the shift of a row the
signals move on by one: the rows of shift 0 hold every pair of subject, moment and signal; all shifts hold every triple.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import xxhash
from tests.together import test_pairs as pairs
from tests.together.test_repeats import CODECS

from espalier.mechanisms.local_rounds.state import LocalRoundsState
from espalier.optim.diloco_slowmo import METHODS
from espalier.plan import base as plans
from espalier.recipe import Recipe

STEPS, VALIDATE_EVERY, SAVE_EVERY = 24, 6, 4

# --- moments and signals ----------------------------------------------------------------------------------------------

MOMENTS = {
    "first step": 1,
    "reading": 4,
    "step": 7,
    "exchange": 10,
    "optimizer step": 13,
    "saving": 16,
    "validation": 18,
    "end": STEPS,
    "exporting": STEPS,
}
"""What a process is at when it is struck, and in which step (or later, where that moment comes next)."""


@dataclass(frozen=True)
class Signal:
    """One way to strike a process. `lasts`: seconds until SIGCONT; None: it never comes."""

    name: str
    number: int
    lasts: float | None = None


KILL, STOP, PAUSE, TERM, INT = SIGNALS = (
    Signal("kill", signal.SIGKILL),
    Signal("stop", signal.SIGSTOP),
    Signal("pause", signal.SIGSTOP, lasts=0.3),
    Signal("term", signal.SIGTERM),
    Signal("int", signal.SIGINT),
)
LAUNCHER = -1
"""The target that is the command itself; other targets are ranks."""
PROMISED = 30.0
"""Seconds from a failure to the next step, and between two events: `comm.timeout` of these runs (docs/faults.md)."""


@dataclass(frozen=True)
class Strike:
    """`signal` reaches `target` when it is at `moment`."""

    moment: str
    signal: Signal
    target: int

    @property
    def name(self) -> str:
        """As files and messages have it."""
        return f"{self.signal.name} at {self.moment} of {'the command' if self.target < 0 else f'rank {self.target}'}"


# --- subjects ---------------------------------------------------------------------------------------------------------

BASES = {
    "text": """
[model]
depth = 2
width = 32
heads = 4
feed_forward = 64
[data]
path = "corpus"
validation = 0.2
[train]
sequence = 32
batch_tokens = 256
validate_tokens = 256
precision = "fp32"
optimizer = { kind = "adamw" }
""",
    "graph": """
[model]
kind = "sage"
width = 16
[data]
path = "planted:nodes=240,degree=6,features=8,classes=3"
[train]
precision = "fp32"
""",
    "scene": """
[model]
kind = "voxels"
resolution = 12
[data]
path = "spheres:views=8,size=12"
[train]
batch_tokens = 64
""",
    "tasks": """
[model]
kind = "multitask"
length = 16
[[towers]]
name = "text"
kind = "text"
width = 16
depth = 2
[[towers]]
name = "package"
kind = "graph"
width = 8
depth = 2
[[tasks]]
name = "source"
data = "corpus"
towers = ["text"]
loss = "next_token"
batch = 4
[[tasks]]
name = "packages"
data = "planted:nodes=200,degree=4,features=8,classes=3"
towers = ["package"]
loss = "classes"
batch = 4
[train]
precision = "fp32"
""",
}
"""Recipes, each of a workload; `data.path = "corpus"` is a folder of texts beside them."""

COMMON = {
    "train.steps": STEPS,
    "train.validate_every": VALIDATE_EVERY,
    "checkpoint.every": SAVE_EVERY,
    "comm.timeout": f"{PROMISED:g}s",
    "faults.heartbeat": "0.3s",
    "faults.rollback": "never",
    "plan.cluster": "machine.toml",
    "plan.trial": False,
    "plan.pin.threads": 1,
}
"""Keys that every run has."""


@dataclass(frozen=True)
class Subject:
    """Mechanisms that are struck together.

    Attributes:
        base: of `BASES`.
        keys: of the recipe, beyond `COMMON`.
        plan: makes the plan; None: the planner does, as the pins say.
        without: moments that this run does not have.
    """

    base: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    plan: Callable[[Recipe], plans.Plan] | None = None
    without: frozenset[str] = frozenset()


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    keys: dict[str, Any] = {}
    for name, value in table.items():
        keys |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return keys


def pair(names: tuple[str, ...]) -> Subject:
    """A run of the covering array of pairs (`test_pairs`)."""
    train: dict[str, Any] = {}
    plan: dict[str, Any] = {}
    for name in names:
        train_of_name, plan_of_name, _ = pairs.ALONE[name]
        train |= train_of_name
        plan |= plan_of_name
    alone = frozenset({"exchange"}) if len(pairs.plan_of(8, **plan).ranks) == 1 else frozenset()
    return Subject("text", flat({"train": train}), partial(pairs.planned, **plan), alone)


def rounds(recipe: Recipe, method: str) -> plans.Plan:
    """Two replicas of one rank that agree after four steps."""
    outer = LocalRoundsState(replicas=((0,), (1,)), method=method, steps=4, adapt=False)
    return plans.Plan(ranks=pairs.shares((0, 4, 8)), micro_batch=8, choices={"local_rounds": outer})


def coded(recipe: Recipe, codec: str) -> plans.Plan:
    """Two ranks whose gradients cross by a codec."""
    exchange = plans.Exchange(traffic="gradients", codec=codec)
    return plans.Plan(ranks=pairs.shares((0, 4, 8)), micro_batch=2, exchanges=(exchange,))


def unequal(recipe: Recipe) -> plans.Plan:
    """Pipelines of two stages and of one, with unequal shares."""
    stages, ranks = [], []
    for number, (layers, share) in enumerate([((1, 2), (0, 5)), ((2,), (5, 8))]):
        for ends in itertools.pairwise((0, *layers)):
            stages.append(plans.Stage(pipeline=number, ranks=(len(ranks),), layers=ends))
            ranks.append(plans.Rank(share=share))
    return plans.Plan(ranks=tuple(ranks), stages=tuple(stages), micro_batch=1)


TWO = {"plan.pin.ranks": 2}
NODE = {**TWO, "plan.pin.offload": "node"}
ZERO_BUBBLE = {"stages": 2, "schedule": "zero_bubble", "micro_batch": 2}
HALO = {**TWO, "graph.halo.synchronize": 1}
ALONE = frozenset({"exchange"})

SUBJECTS: dict[str, Subject] = {
    "data parallel": Subject("text", TWO),
    **{" x ".join(names): pair(names) for names in pairs.RUNS},
    **{f"codec {name}": Subject("text", {}, partial(coded, codec=name)) for name in CODECS},
    "two stages, zero bubble": Subject("text", {}, partial(pairs.planned, **ZERO_BUBBLE)),
    **{f"rounds {name}": Subject("text", {}, partial(rounds, method=name)) for name in METHODS},
    "optimizer node": Subject("text", NODE),
    "optimizer node x int8": Subject("text", {**NODE, "comm.codec": "int8"}),
    "experts": Subject("text", {**TWO, "model.kind": "moe", "model.experts": 4, "plan.pin.ep": 2}),
    "unequal pipelines": Subject("text", {}, unequal),
    "waves": Subject("tasks", TWO),
    "halos": Subject("graph", HALO),
    "halos of few bits": Subject("graph", {**HALO, "graph.halo.bits": 1, "graph.halo.delta": True}),
    "late halos": Subject(
        "graph", {**HALO, "graph.halo.bits": 4, "graph.halo.synchronize": 0, "graph.halo.late": True}
    ),
    "sampled graph": Subject("graph", {**TWO, "graph.fanout": [3, 3], "train.batch_tokens": 16}),
    "graph on disk": Subject(
        "graph",
        {**TWO, "graph.fanout": [3, 3], "train.batch_tokens": 16, "store.memory": "1MiB", "store.path": "packed"}
        | {"store.resample": 0.5},
    ),
    "few bits": Subject("graph", {"plan.pin.ranks": 1, "model.kind": "gcn", "quant.kind": "a2q"}, without=ALONE),
    "graph transformer": Subject(
        "graph", {**HALO, "model.kind": "graph-transformer", "model.heads": 4, "model.recall": 0.5}
    ),
    "scene": Subject("scene", {"plan.pin.ranks": 1}, without=ALONE),
}  # fmt: skip

# --- rows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One run of a subject and what happens to it."""

    subject: str
    shift: int

    @property
    def name(self) -> str:
        """Of the test case."""
        return f"{self.subject} + {self.shift}"

    def strikes(self, ranks: int) -> tuple[Strike, ...]:
        """What happens to a run of so many ranks, in order. The command itself is struck at two moments of each row,
        and where it exports; it is never stopped for ever, as nobody would see that."""
        strikes = []
        for number, moment in enumerate(MOMENTS):
            if moment in SUBJECTS[self.subject].without:
                continue
            kind = SIGNALS[(number + self.shift) % len(SIGNALS)]
            whole = moment == "exporting" or number in (self.shift, self.shift + 4)
            target = (
                LAUNCHER if whole and (kind is not STOP or moment == "exporting") else (number + self.shift) % ranks
            )
            strikes.append(Strike(moment, PAUSE if target == LAUNCHER and kind is STOP else kind, target))
        return tuple(strikes)

    @property
    def chosen(self) -> bool:
        """Whether the normal suite runs it: a twentieth of the rows of shift 0, which are a covering array."""
        return self.shift == 0 and xxhash.xxh3_64_intdigest(self.subject.encode(), seed=TWENTIETH) % 20 == 0


TWENTIETH = 105257
"""Seed of the hash that picks the twentieth: text, a graph and a scene, of at most two ranks, so that the normal suite
stays short."""
ROWS = [Row(subject, shift) for subject in SUBJECTS for shift in range(len(SIGNALS))]

# --- what cannot be equal ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unequal:
    """Why weights may differ, in the words of docs/faults.md and of these `pages`."""

    reason: str
    pages: tuple[str, ...]


UNEQUAL = {
    "rounds whose lengths follow measured waits": Unequal(
        "Adapted lengths may differ from run to run",
        ("src/espalier/mechanisms/local_rounds/README.md",),
    ),
    "rounds, and a machine of several is lost": Unequal(
        "with rounds a lost machine does: its replica's current round is missing from an average",
        ("src/espalier/mechanisms/local_rounds/README.md",),
    ),
}
"""What no row of the table strikes, as its weights may then differ."""
