"""What rounds learn beside data parallel training, from equal tokens: all replicas of all runs in one process.

Part of bench/co2.py (`--only learning`). The parameters of all replicas are stacked, so a batched product serves them
all; every method by rounds runs in the engine that `espalier train` uses, whose exchange is a sum in rank order in this
process. No figure depends on timing, links or the number of processors.
"""

from __future__ import annotations

import math
import statistics
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.co2 import chosen_of
from espalier.mechanisms.local_rounds.membership import MemberGroup, MemberReport, OuterSum
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import WARM
from espalier.optim.schedules import factor
from espalier.recipe import Stable
from table import Row

REPLICAS, LENGTH, WORDS = 4, 8, 128
BEFORE = {"penalty": "none"}
"""CO2 as its authors' code has it."""


class Shape(NamedTuple):
    """Of the decoder and of a replica's batch."""

    width: int = 32
    depth: int = 1
    heads: int = 4
    sequence: int = 32
    windows: int = 2

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name."""
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {"embedding": (WORDS, width), "positions": (self.sequence, width)}
        for layer in range(self.depth):
            shapes |= {f"qkv{layer}": (width, 3 * width), f"out{layer}": (width, width)}
            shapes |= {f"up{layer}": (width, 4 * width), f"down{layer}": (4 * width, width)}
            shapes |= {f"norm{layer}": (width,), f"feed{layer}": (width,)}
        return shapes | {"last": (width,), "head": (width, WORDS)}

    @property
    def parameters(self) -> int:
        """How many."""
        return sum(map(math.prod, self.tensors.values()))


# --- the model ------------------------------------------------------------------------------------------------------


def start(shape: Shape, seed: int) -> dict[str, Tensor]:
    """A model's parameters at the beginning."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, size in shape.tensors.items():
        scale = {"h": 0.07, "o": 0.35, "d": 0.35}.get(name[0], 0.7) / math.sqrt(size[0])
        scale = 0.02 if name in ("embedding", "positions") else scale
        tensors[name] = torch.ones(size) if len(size) == 1 else scale * torch.randn(size, generator=generator)
    return tensors


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight[:, None]


def forward(shape: Shape, tensors: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """[stack, windows * sequence, words] of `tokens` [stack, windows, sequence] by stacked parameters."""
    stack, windows, length = tokens.shape
    width, heads = shape.width, shape.heads
    picked = tokens.reshape(stack, -1, 1).expand(-1, -1, width)
    x = tensors["embedding"].gather(1, picked).view(stack, windows, length, width)
    x = (x + tensors["positions"][:, None, :length]).view(stack, windows * length, width)
    for layer in range(shape.depth):
        joined = torch.bmm(_norm(x, tensors[f"norm{layer}"]), tensors[f"qkv{layer}"])
        parts = joined.view(stack * windows, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + torch.bmm(mixed.transpose(1, 2).reshape(stack, -1, width), tensors[f"out{layer}"])
        hidden = F.gelu(torch.bmm(_norm(x, tensors[f"feed{layer}"]), tensors[f"up{layer}"]))
        x = x + torch.bmm(hidden, tensors[f"down{layer}"])
    return torch.bmm(_norm(x, tensors["last"]), tensors["head"])


class Text:
    """Python's library as bytes, the last twentieth held out."""

    def __init__(self, sequence: int) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        data = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        data = data.long().clamp_(max=WORDS - 1)
        cut = int(len(data) * 0.95)
        self.reach = torch.arange(sequence + 1)
        self.training, self.rest = data[:cut], data[cut:]
        self.held_out = self._windows(self.rest, 512, torch.Generator().manual_seed(7))

    def _windows(self, data: Tensor, count: int, generator: torch.Generator) -> Tensor:
        first = torch.randint(0, len(data) - len(self.reach), (count,), generator=generator)
        return data[first[:, None] + self.reach]

    def batch(self, seed: int, step: int, replica: int, windows: int) -> Tensor:
        """[windows, sequence + 1] of a replica's step."""
        number = (seed * 1_000_003 + step) * REPLICAS + replica
        return self._windows(self.training, windows, torch.Generator().manual_seed(number))


# --- replicas in one process ------------------------------------------------------------------------------------------


class Hall:
    """Where the members of a run meet. Has state: what each has sent, by flight."""

    def __init__(self) -> None:
        self.condition = Condition()
        self.flights: dict[int, dict[int, tuple[Tensor, MemberReport]]] = {}


class Meeting:
    """A member's exchanges with the others of its process: `membership.Members` without a network."""

    def __init__(self, hall: Hall, member: int) -> None:
        self.hall, self.member, self.count = hall, member, 0
        self.crew = MemberGroup(None, member, tuple(range(REPLICAS)))
        self.members, self.codec = self.crew.members, codec("exact")

    def launch(self, values: Tensor, residual: Tensor | None, note: MemberReport) -> int:
        """Gives `values`; returns the flight's number."""
        self.count += 1
        with self.hall.condition:
            self.hall.flights.setdefault(self.count, {})[self.member] = (values, note)
            self.hall.condition.notify_all()
        return self.count

    def arrive(self, number: int) -> OuterSum:
        """The sum of what all gave, in rank order."""
        with self.hall.condition:
            self.hall.condition.wait_for(lambda: len(self.hall.flights[number]) == REPLICAS, timeout=60)
            sent = [self.hall.flights[number][member] for member in self.members]
            self.hall.flights.pop(number - 2, None)
        total = sent[0][0].clone()
        for values, _ in sent[1:]:
            total += values
        return OuterSum(total, {member: note for member, (_, note) in enumerate(sent)}, 0.0)

    def close(self) -> None:
        """Nothing is open."""


class Run:
    """One method with one seed. Has state: the engines of its replicas, none of data parallel training."""

    def __init__(self, method: str, settings: dict[str, Any], seed: int, live: Sequence[Sequence[Tensor]]) -> None:
        self.seed, self.live, hall = seed, live, Hall()
        self.engines: list[OuterSync] = []
        if method != "ddp":
            choices = chosen_of(method, settings)
            for member, tensors in enumerate(live):
                meeting: Any = Meeting(hall, member)
                self.engines.append(OuterSync(tensors, choices, meeting, Rounds(LENGTH)))

    def stepped(self, rate: float, pool: ThreadPoolExecutor) -> None:
        """After a local step of all."""
        if self.engines and self.engines[0].clock + 1 == LENGTH:
            list(pool.map(lambda engine: engine.after_step(rate), self.engines))
        else:
            for engine in self.engines:
                engine.after_step(rate)

    def finish(self, rate: float, pool: ThreadPoolExecutor) -> None:
        """Makes all replicas one."""
        list(pool.map(lambda engine: engine.finish(rate), self.engines))


class AdamW:
    """AdamW over stacked parameters, each replica's gradient clipped to a norm of 1. Has state."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.mean = [torch.zeros_like(tensor) for tensor in tensors]
        self.square = [torch.zeros_like(tensor) for tensor in tensors]
        self.steps = 0

    def step(self, gradients: Sequence[Tensor], rate: float) -> None:
        """One step."""
        self.steps += 1
        norms = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0).sqrt()
        shrink = (1 / norms).clamp(max=1.0)
        first, second = 1 - 0.9**self.steps, 1 - 0.95**self.steps
        for tensor, gradient, mean, square in zip(self.tensors, gradients, self.mean, self.square, strict=True):
            gradient.mul_(shrink.view(-1, *[1] * (gradient.dim() - 1)))
            mean.lerp_(gradient, 0.1)
            square.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
            if tensor.dim() > 2:
                tensor.mul_(1 - 0.1 * rate)
            tensor.addcdiv_(mean, (square / second).sqrt_().add_(1e-8), value=-rate / first)


def train(cases: dict[str, tuple[str, dict[str, Any]]], seeds: Sequence[int], steps: int, shape: Shape) -> list[float]:
    """Held-out losses after `steps` of every case with every seed, in this order."""
    torch.set_num_threads(1)
    text = Text(shape.sequence)
    starts = [start(shape, seed) for _ in cases for seed in seeds for _ in range(REPLICAS)]
    stacked = {name: torch.stack([each[name] for each in starts]).requires_grad_() for name in shape.tensors}
    tensors = list(stacked.values())
    plain = [tensor.detach() for tensor in tensors]
    kinds = [(kind, seed) for kind in cases.values() for seed in seeds]
    runs = []
    for index, ((method, settings), seed) in enumerate(kinds):
        rows = range(index * REPLICAS, (index + 1) * REPLICAS)
        runs.append(Run(method, settings, seed, [[tensor[row] for tensor in plain] for row in rows]))
    places = [seeds.index(run.seed) * REPLICAS + replica for run in runs for replica in range(REPLICAS)]
    optimizer = AdamW(plain)
    with ThreadPoolExecutor(REPLICAS) as pool:
        for step in range(steps):
            each = [text.batch(seed, step, replica, shape.windows) for seed in seeds for replica in range(REPLICAS)]
            batch = torch.stack(each)[places]
            words = forward(shape, stacked, batch[..., :-1]).flatten(0, 1)
            loss = F.cross_entropy(words, batch[..., 1:].flatten(), reduction="sum")
            gradients = list(torch.autograd.grad(loss / (shape.windows * shape.sequence), tensors))
            rate = 3e-3 * factor(Stable(), step, steps)
            _average([index for index, run in enumerate(runs) if not run.engines], gradients)
            with torch.no_grad():
                optimizer.step(gradients, rate)
                for run in runs:
                    run.stepped(rate, pool)
        for run in runs:
            run.finish(rate, pool)
    return [_evaluate(shape, plain, index * REPLICAS, text) for index in range(len(runs))]


def _average(exact: Sequence[int], gradients: Sequence[Tensor]) -> None:
    """Gives the replicas of these runs the mean of their gradients."""
    for index in exact:
        for gradient in gradients:
            rows = gradient[index * REPLICAS : (index + 1) * REPLICAS]
            rows.copy_(rows.mean(0, keepdim=True).expand_as(rows))


@torch.no_grad()
def _evaluate(shape: Shape, tensors: Sequence[Tensor], row: int, text: Text) -> float:
    one_model = {name: tensor[row : row + 1] for name, tensor in zip(shape.tensors, tensors, strict=True)}
    words = forward(shape, one_model, text.held_out[None, :, :-1])[0]
    return float(F.cross_entropy(words, text.held_out[:, 1:].flatten()))


def cases(rounds: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Methods and their settings in a run of so many rounds."""
    published: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in ("local_sgd", "diloco", "eager")}
    ours = {"co2 before": ("co2", BEFORE), "co2": ("co2", {"warm": rounds // WARM})}
    return {"ddp": ("ddp", {}), **published, **ours}


def learning(steps: int, seeds: Sequence[int], shape: Shape | None = None) -> list[Row]:
    """The table: every method beside data parallel training, medians over the seeds."""
    shape = shape or Shape()
    kinds = cases(steps // LENGTH)
    losses = train(kinds, seeds, steps, shape)
    by_kind = {name: losses[index * len(seeds) : (index + 1) * len(seeds)] for index, name in enumerate(kinds)}
    tokens = steps * REPLICAS * shape.windows * shape.sequence
    rows = []
    for name in list(kinds)[1:]:
        ratios = [peer / ours for peer, ours in zip(by_kind["ddp"], by_kind[name], strict=True)]
        run = f"{shape.parameters / 1e6:.2f} M, {steps // LENGTH} rounds of {LENGTH}"
        case = f"{run}, {name}: loss after {tokens} tokens"
        medians = statistics.median(by_kind["ddp"]), statistics.median(by_kind[name])
        spread = f"{min(ratios):.3f}-{max(ratios):.3f} (seeds, n={len(seeds)})"
        rows.append(Row(case, "ddp", *medians, statistics.median(ratios), "nats", spread))
    return rows
