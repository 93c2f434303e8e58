"""What codecs do to the loss: the paper's three schemes and int8 with feedback, beside nothing compressed.

    python bench/hybrid_loss.py [--quick] [--seeds N] [--json FILE] [--only schemes,cause]

A byte-level decoder on the standard library's sources, over 4 ranks with ZeRO-1 by hand, so that parameters cross the
wire as the paper's do: gradients are reduce-scattered to the rank that owns the float32 masters, AdamW moves these, and
the new parameters are all-gathered; both through a Channel, each class with the scheme's codec. The paper's schemes
have no error feedback, ours has. Every contestant of a seed begins with the same weights and sees the same tokens. The
loss is that of held-out windows after the last step. Activations of tensor and pipeline parallelism, where the paper
rounds too, are not sent by anything in Espalier yet, so the schemes differ here only in what they do to parameters.

`cause`: int8 beside exact gradients with unbiased noise of its size and no feedback, at the learning rate that a recipe
gets by default and at a third of it. Where int8 changes the loss no more than such noise does, no sum is wrong.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
import torch.distributed as dist
from torch import Tensor, nn

from espalier.comm import Traffic, traffic
from espalier.comm.base import feedback
from espalier.comm.codecs import codec
from espalier.language.workload import LanguageWorkload, open_language
from espalier.launch.ranks import agent
from espalier.mechanisms.codecs import hybrid_compression
from espalier.parallel.workload import Shard
from espalier.recipe import Adamw, Recipe, defaults, recipe_file
from espalier.train import worker
from espalier.train.rank_spec import RankSpec
from table import Row, compare, publish

RANKS = 4
BLOCK = 256
HELD_OUT = 2**16
"""Tokens."""


@dataclass(frozen=True)
class Scheme:
    """How gradients and parameters cross the wire.

    Attributes:
        gradients, parameters: codecs.
        feedback: whether what is lost of gradients is added to the next ones.
        noise: whether gradients get noise of int8's size instead.
        rate: learning rate; 0: the recipe's.
    """

    gradients: str = "exact"
    parameters: str = "exact"
    feedback: bool = False
    noise: bool = False
    rate: float = 0.0


def schemes() -> dict[str, Scheme]:
    """The paper's, and ours."""
    found = {"uncompressed": Scheme(), "int8 with feedback": Scheme("int8", feedback=True)}
    for name, policy in hybrid_compression.POLICIES.items():
        found[name] = Scheme(policy[Traffic.GRADIENTS], policy[Traffic.PARAMETERS])
    return found


def noisy(gradient: Tensor, generator: torch.Generator) -> Tensor:
    """[n] with uniform noise of one int8 step of each block."""
    rows = gradient.view(-1, BLOCK)
    steps = rows.abs().amax(1, keepdim=True) / 127
    return (rows + (torch.rand(rows.shape, generator=generator) - 0.5) * steps).view(-1)


class Zero1:
    """Masters of one rank's part of all parameters, moved by AdamW. Has state: them, and the residual."""

    def __init__(self, model: nn.Module, scheme: Scheme, place: RankSpec, options: Adamw) -> None:
        self.parameters = list(model.parameters())
        self.scheme, self.options = scheme, options
        count = sum(one.numel() for one in self.parameters)
        self.each = -(-count // (RANKS * BLOCK)) * BLOCK
        self.whole = torch.zeros(RANKS * self.each)
        torch.cat([one.detach().reshape(-1) for one in self.parameters], out=self.whole[:count])
        self.views = [
            part.view_as(one)
            for one, part in zip(
                self.parameters, self.whole[:count].split([one.numel() for one in self.parameters]), strict=True
            )
        ]
        for one, view in zip(self.parameters, self.views, strict=True):
            one.data = view
        self.master = self.whole[place.rank * self.each :][: self.each].clone()
        self.residual = torch.zeros_like(self.whole) if scheme.feedback else None
        self.optimizer = torch.optim.AdamW(
            [self.master], lr=1.0, betas=options.betas, eps=options.epsilon, weight_decay=options.weight_decay
        )
        self.generator = torch.Generator().manual_seed(place.rank)
        self.group = dist.new_group(list(range(RANKS)))
        for kind, name in ((Traffic.GRADIENTS, scheme.gradients), (Traffic.PARAMETERS, scheme.parameters)):
            if name != "exact":
                self.group.use(kind, codec(name))

    def step(self, rate: float) -> None:
        """Adds up the gradients, moves the masters, brings the parameters back."""
        gradient = torch.zeros_like(self.whole)
        flat = [one.grad.reshape(-1) for one in self.parameters if one.grad is not None]
        torch.cat(flat, out=gradient[: sum(len(one) for one in flat)])
        if self.scheme.noise:
            gradient = noisy(gradient, self.generator)
        mine = torch.empty(self.each)
        with traffic(Traffic.GRADIENTS), feedback(self.residual):
            dist.reduce_scatter_single(mine, gradient, group=self.group)
        norm = torch.linalg.vector_norm(mine).square()
        with traffic(Traffic.CONTROL):
            dist.all_reduce(norm, group=self.group)
        self.master.grad = mine / max(1.0, float(norm.sqrt()))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        with traffic(Traffic.PARAMETERS):
            dist.all_gather_single(self.whole, self.master, group=self.group)
        for one in self.parameters:
            one.grad = None


def trained(place: RankSpec, workload: LanguageWorkload, recipe: Recipe, scheme: Scheme) -> float:
    """The loss on held-out windows, in nats per byte, after the recipe's steps."""
    assert isinstance(recipe.train.optimizer, Adamw)
    assert recipe.train.steps is not None
    assert recipe.train.optimizer.learning_rate is not None
    torch.set_num_threads(1)
    model = workload.build(torch.device("cpu"), torch.float32)
    samples = workload.global_batch
    mine = Shard(samples * place.rank // RANKS, samples * (place.rank + 1) // RANKS, samples)
    with worker.joined(place, 120.0):
        state = Zero1(model, scheme, place, recipe.train.optimizer)
        top = scheme.rate or recipe.train.optimizer.learning_rate
        for step in range(recipe.train.steps):
            for batch in workload.batches(step, mine):
                loss, _ = workload.loss(model, batch)
                (loss / workload.nominal_weight).backward()
            warm = min(1.0, (step + 1) / 20)
            state.step(top * warm * 0.5 * (1 + math.cos(math.pi * step / recipe.train.steps)))
        count = workload.validation_samples()
        part = Shard(count * place.rank // RANKS, count * (place.rank + 1) // RANKS, 32)
        with torch.no_grad():
            sums = torch.tensor(workload.evaluate(model, part)["loss"], dtype=torch.float64)
        with traffic(Traffic.CONTROL):
            dist.all_reduce(sums, group=state.group)
    return float(sums[0] / sums[1])


SIZES = {"quick": (2, 64, 100), "cause": (2, 64, 300), "schemes": (3, 96, 400)}
"""Depth, width and steps: 0.1 M and 0.36 M parameters, 0.2 M to 0.8 M tokens."""


def recipe_of(seed: int, size: str) -> Recipe:
    """A decoder of one of the sizes."""
    depth, width, steps = SIZES[size]
    table: dict[str, Any] = {
        "model": {"depth": depth, "width": width, "heads": 4},
        "data": {"path": "python:stdlib"},
        "train": {
            "steps": steps,
            "sequence": 128,
            "batch_tokens": 2048,
            "seed": seed,
            "validate_tokens": HELD_OUT,
            "optimizer": {"kind": "adamw"},
        },
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


def shown(size: str) -> str:
    """For the names of rows."""
    depth, width, steps = SIZES[size]
    return f"{depth} layers of {width}, {steps} steps, "


def losses(asked: dict[str, Scheme], seeds: Sequence[int], size: str) -> dict[str, list[float]]:
    """By scheme, one for each seed."""
    found: dict[str, list[float]] = {name: [] for name in asked}
    for seed in seeds:
        recipe = recipe_of(seed, size)
        workload = open_language(recipe)
        for name, scheme in asked.items():
            places = [RankSpec(rank=one, world=RANKS, local_rank=one) for one in range(RANKS)]
            loss = agent.run(partial(trained, workload=workload, recipe=recipe, scheme=scheme), places)[0]
            found[name].append(loss)
            print(f"seed {seed}, {name}: {loss:.4f}", file=sys.stderr, flush=True)
    return found


def beside(asked: dict[str, Scheme], seeds: Sequence[int], size: str, case: str) -> list[Row]:
    """Rows of all schemes beside the first."""
    found = losses(asked, seeds, size)
    plain = next(iter(asked))
    return [
        compare(f"{case}{name}", "uncompressed", "nats/byte", list(zip(mine, found[plain], strict=True)), False)
        for name, mine in found.items()
        if name != plain
    ]


def cause(seeds: Sequence[int], size: str) -> list[Row]:
    """Int8 beside noise of its size, at two learning rates."""
    rows = []
    options = recipe_of(1, size).train.optimizer
    assert options.learning_rate is not None
    for part in (1.0, 1 / 3):
        rate = options.learning_rate * part
        asked = {"exact": Scheme(), "int8": Scheme("int8", feedback=True), "noise of int8's size": Scheme(noise=True)}
        asked = {name: replace(one, rate=rate) for name, one in asked.items()}
        rows += beside(asked, seeds, size, f"{shown(size)}AdamW at {rate:.2g}, ")
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer steps")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--only", default="schemes,cause")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in ("int8", "mpc", "zfp:8"):  # compiled before ranks wait for one another
        one = codec(name)
        some = torch.randn(BLOCK)
        wire = one.encode(some)
        assert wire is not None
        one.decode(wire, some)
    seeds, rows = range(1, asked.seeds + 1), []
    if "schemes" in asked.only:
        size = "quick" if asked.quick else "schemes"
        rate = recipe_of(1, size).train.optimizer.learning_rate
        assert rate is not None
        chosen = {name: replace(one, rate=rate / 3) for name, one in schemes().items()}
        rows += beside(chosen, seeds, size, shown(size))
    if "cause" in asked.only:
        rows += cause(seeds, "quick" if asked.quick else "cause")
    publish(rows, asked.json)


if __name__ == "__main__":
    main()
