"""The phases of a run: which one it is in, and what a model takes over from the phase before.

A phase ends with a checkpoint. The next one begins by turning that checkpoint into one of its own model: what keeps
its name and shape keeps its value and the optimizer's state, `Workload.carry` says what becomes of the rest, and what
is new is as built. From there on it is resumed like any other run.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from espalier.checkpoint import run_identity
from espalier.checkpoint.save_and_restore import CheckpointInfo, Checkpoints
from espalier.optim import adamw, muon
from espalier.optim.base import Optimizer, owned_by
from espalier.parallel.workload import Phase, Workload
from espalier.recipe import Muon, Recipe
from espalier.recipe.errors import UserError
from espalier.train.build import DTYPES
from espalier.train.optimizers import tables_of
from espalier.train.run_folder import RunFolder


def checkpoints(recipe: Recipe, folder: RunFolder) -> Checkpoints:
    """Where the states of the run in `folder` are, for this process alone."""
    target = recipe.checkpoint.target or folder.checkpoints
    saved = Checkpoints(target, keep=recipe.checkpoint.keep, keep_best=recipe.checkpoint.keep_best)
    saved.run = run_identity.read(folder.path)
    return saved


def held(workload: Workload, saved: Checkpoints) -> Workload:
    """The workload of the phase whose model the newest checkpoint holds."""
    phases = workload.phases()
    begun = next((_begun(entry) for entry in reversed(saved.entries()) if not entry.why), 0)
    return workload.at(next((phase for phase in phases if phase.start == begun), phases[0]))


def reached(workload: Workload, step: int) -> Phase:
    """The phase of the step that follows after `step` steps, or the last."""
    phases = workload.phases()
    return next((phase for phase in phases if step < phase.stop), phases[-1])


def enter(recipe: Recipe, workload: Workload, saved: Checkpoints) -> Workload:
    """The workload of the phase that the run is in, its newest checkpoint turned into one of that phase."""
    phases = workload.phases()
    if len(phases) == 1:
        return workload
    damaged: UserError | None = None
    for entry in reversed([entry for entry in saved.entries() if not entry.why]):
        phase = reached(workload, entry.step)
        if _begun(entry) == phase.start:
            return workload.at(phase)
        before = next(earlier for earlier, following in pairwise(phases) if following == phase)
        try:
            _carry_over(recipe, workload.at(before), workload.at(phase), saved, phase.start)
        except UserError as error:
            damaged = damaged or error  # an older one may be whole: ranks find it
            continue
        return workload.at(phase)
    if damaged is not None:
        raise damaged
    return workload.at(phases[0])


def _begun(entry: CheckpointInfo) -> int:
    """The first step of the phase whose model a checkpoint holds."""
    return int(entry.meta.get("phase", 0))


def _carry_over(recipe: Recipe, before: Workload, after: Workload, saved: Checkpoints, step: int) -> None:
    old, old_optimizer = _made(recipe, before)
    loaded = saved.load({"model": old, "optimizer": old_optimizer}, step=step)
    assert loaded is not None, "a step that is not there is refused"
    new, optimizer = _made(recipe, after)
    alike = _same_shapes(old.state_dict(), new.state_dict())
    moved = _same_shapes(after.carry(old.state_dict()), new.state_dict())
    new.load_state_dict({**new.state_dict(), **moved})
    state = {key: value for key, value in old_optimizer.state_dict().items() if key.rpartition("/")[0] in alike}
    optimizer.load_state_dict({**optimizer.state_dict(), **_same_shapes(state, optimizer.state_dict())})
    saved.save(step, {"model": new, "optimizer": optimizer}, {**loaded.meta, "phase": step}, wait=True)
    saved.abandon()


def _made(recipe: Recipe, workload: Workload) -> tuple[nn.Module, Optimizer]:
    """The phase's model as built, and its optimizer, on one rank."""
    model = workload.build(torch.device("cpu"), DTYPES[recipe.train.precision])
    options = recipe.train.optimizer
    if not isinstance(options, Muon):
        return model, adamw.build(options, owned_by(model))
    return model, muon.build(options, owned_by(model), tables_of(workload, model))


def _same_shapes(given: Any, expected: Any) -> dict[str, Tensor]:
    """What of `given` has an entry of its shape in `expected`."""
    return {name: value for name, value in given.items() if name in expected and value.shape == expected[name].shape}
