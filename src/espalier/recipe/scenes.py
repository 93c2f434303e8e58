"""Radiance fields of scenes: their options, and what a recipe leaves open of them. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal

from espalier.recipe.base import Draft, Model, ModelKind, RecipeBase, refuse_mixture_and_recompute, with_optimizer
from espalier.recipe.errors import UserError


class Voxels(Model, frozen=True, tag="voxels"):
    """A radiance field on voxel grids (DVGO, arXiv 2111.11215): a density, features, and a network of their colours.

    `resolution`: cells of a side of the fine grids; `features`: columns of a cell; `width`: of the colour network;
    `coarse`: share of the steps of the first stage, which finds where something is on a grid of half the resolution.
    """

    resolution: int = 64
    features: int = 12
    width: int = 64
    coarse: float = 0.25


class SpikingNerf(Voxels, frozen=True, tag="spikingnerf"):
    """A voxel field whose colours are computed by spikes (SpikingNeRF, arXiv 2309.10987).

    `alignment`: samples of a ray as time steps, one after the other (`"tcp"`) or with gaps where nothing is (`"tp"`);
    `"repeated"` shows each sample four times, as usual spiking networks do. `flip`: rays run from far to near.
    `spike_penalty`: weight in the loss of a ray of the share of products that its spikes ask for, summed over samples.
    """

    alignment: Literal["tcp", "tp", "repeated"] = "tcp"
    flip: bool = False
    spike_penalty: float = 0.0


def _fill(draft: Draft) -> None:
    draft.fill("train.sequence", 1, "a ray counts as one token")
    draft.fill("train.batch_tokens", 2048, "2,048 rays a step")
    spiking = isinstance(draft.recipe.model, SpikingNerf)
    steps = (1600, "twice those of a plain network, as its authors train it") if spiking else (800, "enough for 30 dB")
    draft.fill("train.steps", *steps)
    draft.rates(1e-3, "the rate of DVGO's colour network; grids move a hundred times as fast")


def _check(recipe: RecipeBase) -> None:
    if recipe.train.steps is not None and recipe.train.steps < 2:
        raise UserError("A scene is trained in two stages.", why=f"train.steps = {recipe.train.steps}", do="2 or more")
    refuse_mixture_and_recompute(recipe, "a scene")
    if recipe.train.precision not in ("auto", "fp32", "fp64"):
        raise UserError(
            f"train.precision = {recipe.train.precision!r} is not possible for a scene.",
            why="spikes and compositing are computed in single precision",
            do='train.precision = "fp32"',
        )


def _usual(table: dict[str, Any]) -> dict[str, Any]:
    """DVGO's optimizer where none is named: Adam without decay, at a rate that falls to a tenth; no clipping."""
    train = table.get("train", {})
    if not isinstance(train, dict):
        return table
    schedule = {"kind": "cosine", "warmup": 0.01, "floor": 0.1}
    usual = {"precision": "fp32", "clip": 0.0, "schedule": schedule, "validate_tokens": 8192}
    table = {**table, "train": {**usual, **train}}
    return with_optimizer(table, {"kind": "adamw", "weight_decay": 0.0, "betas": [0.9, 0.99]})


KIND = ModelKind(
    name="a scene",
    options=(Voxels, SpikingNerf),
    row="espalier.radiance.workload_row",
    fill=_fill,
    check=_check,
    usual=_usual,
    unit="rays",
    data="knot:",
)

__all__ = ["KIND", "SpikingNerf", "Voxels"]
