"""Short runs of cut models through the Trainer on forked ranks, and the same run on one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.language.workload import open_language
from espalier.launch.ranks import agent
from espalier.parallel.action_list import Action, ActionKind
from espalier.parallel.workload import Workload
from espalier.plan import base as plans
from espalier.recipe import Recipe, defaults, recipe_file
from espalier.train import rank_spec as launch
from espalier.train import trainer, worker
from espalier.train.rank_setup import RankSetup

STEPS = 3


def corpus(folder: Path) -> Path:
    for number in range(9):
        (folder / f"{number}.txt").write_text("".join(f"{number} plus {i} is {number + i}\n" for i in range(80)))
    return folder


def recipe_of(folder: Path, model: Mapping[str, Any] | None = None, train: Mapping[str, Any] | None = None) -> Recipe:
    table = {
        "model": {"depth": 4, "width": 32, "heads": 2, "feed_forward": 64} | dict(model or {}),
        "data": {"path": str(folder), "cache": str(folder.parent / "cache"), "validation": 0.2},
        "train": {"steps": STEPS, "sequence": 16, "batch_tokens": 128, "precision": "fp64"}
        | {"optimizer": {"kind": "adamw"}, "validate_every": 2, "validate_tokens": 16 * 10}
        | dict(train or {}),
    }
    return defaults.resolve(recipe_file.from_table(table))[0]


class Cut(NamedTuple):
    """How a plan cuts a model: the layer at which each stage ends, and what plans say besides."""

    ends: tuple[int, ...]
    dp: int = 1
    interleave: int = 1
    schedule: str = "1f1b"
    micro_batch: int = 1
    shard: tuple[int, int, int] = (1, 1, 1)
    recompute: str = "none"
    precision: str = "fp64"
    codec: str = "exact"

    def plan(self, samples: int = 8) -> plans.Plan:
        places = len(self.ends) // self.interleave
        shares = [(samples * one // self.dp, samples * (one + 1) // self.dp) for one in range(self.dp)]
        stages = [
            plans.Stage(
                ranks=tuple(range(stage % places * self.dp, (stage % places + 1) * self.dp)), layers=(first, last)
            )
            for stage, (first, last) in enumerate(zip((0, *self.ends), self.ends, strict=False))
        ]
        groups = [tuple(range(size)) if size > 1 else () for size in self.shard]
        unit = plans.Unit(**dict(zip(("params", "grads", "optimizer"), groups, strict=True)), whole=True)
        return plans.Plan(
            ranks=tuple(plans.Rank(share=share) for _ in range(places) for share in shares),
            stages=tuple(stages) if len(stages) > 1 else (),
            units=(unit,),
            schedule=self.schedule,
            interleave=self.interleave,
            micro_batch=self.micro_batch,
            recompute=self.recompute,
            precision=self.precision,
            exchanges=(plans.Exchange(traffic="activations", codec=self.codec),) if self.codec != "exact" else (),
        )


def in_flight(actions: Iterable[Action]) -> int:
    """The most micro-batches whose activations a rank keeps at once, counted for each of its stages."""
    most = now = 0
    for one in actions:
        now += one.kind is ActionKind.FORWARD
        now -= one.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT)
        most = max(most, now)
    return most


class Trained(NamedTuple):
    """What a run on a rank showed."""

    losses: list[float]
    norms: list[float]
    validation: list[float]
    weights: dict[str, torch.Tensor]
    bytes: dict[tuple[str, str], float]
    held: int
    texts: list[str]


def train(
    recipe: Recipe,
    plan: plans.Plan,
    saved: Path | None = None,
    workload: Workload | None = None,
    until: int | None = None,
    sample: bool = False,
    into: Path | None = None,
) -> list[Trained]:
    """The run of each rank. With `saved`, it begins with the newest checkpoint there and saves at its end; with `into`
    it saves there what it has begun with, and ends."""
    opened = workload or open_language(recipe)

    def life(place: launch.RankSpec) -> tuple[Any, ...]:
        told: dict[str, list[Any]] = {"loss": [], "gradient_norm": [], "validation": []}

        def emit(event: str, **fields: Any) -> None:
            if event == "step":
                told["loss"].append(fields["loss"])
                told["gradient_norm"].append(fields["gradient_norm"])
            elif event == "validation":
                told["validation"].append(fields["loss"])

        with worker.joined(place, 90.0) as channel:
            made = trainer.Trainer(RankSetup(recipe, plan, opened, place, emit=emit), channel)
            checkpoints = None
            if saved is not None:
                checkpoints = Checkpoints(saved, keep=9, group=worker.saving_group(made.mesh.trainers))
                made.restore(checkpoints)
            made.steps = until or made.steps
            if into is None:
                made.run(checkpoints)
            else:
                copies = Checkpoints(into, keep=9, group=worker.saving_group(made.mesh.trainers))
                made.save(copies, None, wait=True)
                copies.close()
            if checkpoints is not None:
                checkpoints.close()
            texts = [str(one) for one in made.sample()] if sample else []
            model = made.built.model
            made.built.sharding.detach()
            weights = {name: one.detach().clone() for name, one in model.named_parameters()}
            sent = dict(channel.ledger.bytes) if channel is not None else {}
            held = sum(one.numel() for one in model.parameters())
        return tuple(Trained(told["loss"], told["gradient_norm"], told["validation"], weights, sent, held, texts))

    return [Trained(*one) for one in agent.run(life, launch.places(plan))]


def together(ranks: Sequence[Trained]) -> dict[str, torch.Tensor]:
    """The parameters of all ranks; those that several hold are alike."""
    found: dict[str, torch.Tensor] = {}
    for one in ranks:
        for name, value in one.weights.items():
            assert name not in found or torch.equal(found[name], value), name
            found[name] = value
    return found
