"""Loss spikes: rolls a run back to the last good checkpoint and skips the offending batches.

After Acme (arXiv 2403.07648), section 6.1. The verdict is a function of losses and gradient norms that all ranks know,
so all reach it after the same step without asking each other; `train.anomaly` has the rule. The attempt then
ends, and whoever started it starts it again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from espalier.checkpoint.save_and_restore import Checkpoints
from espalier.parallel.agreement import AgreedStep
from espalier.parallel.mesh import REPLICA
from espalier.recipe.errors import Anomaly, UserError
from espalier.train import skip_list
from espalier.train.anomaly import Course, Verdict
from espalier.train.plateau import Fall, Plateau
from espalier.train.rank_setup import RankSetup
from espalier.train.skip_list import Skips

_HIGH = 0.5
"""Of the learning rate: below it, in a schedule's tail or warmup, a loss may well stand still."""


class Healing:
    """One attempt's view of what the run leaves out. Has state: that list, and the losses so far.

    All ranks make it, and hold the same; where replicas agree by rounds (not `common`) their losses differ in between,
    and they compare them before they save.
    """

    def __init__(self, setting: RankSetup, saved: Checkpoints, common: bool) -> None:
        assert setting.folder is not None, "only a run with a folder can be put back"
        self.folder = setting.folder
        self.saved = saved
        self.setting = setting
        faults = setting.recipe.faults
        self._common = common
        self._course = None if faults.rollback == "never" else Course(faults.rollback)
        self._plateau = None if faults.plateau == "never" else Plateau(faults.plateau)
        self._found: Verdict | None = None
        """Of this replica, not known to the others yet."""

        def told(_: list[None]) -> list[dict[str, Any]]:
            return [msgspec.to_builtins(skip_list.read(self.folder))] * saved.team.world

        self.skips = Skips()
        if not setting.new:
            read = saved.team.agree("reading what the run leaves out", lambda: None, told)
            self.skips = msgspec.convert(read, Skips)

    def began(self, step: int) -> None:
        """The run goes on from `step`. What it was put back from is removed."""
        if self.skips.back_to is None:
            return
        self.saved.forget(step)
        self._keep(self.skips.settled())

    def watch(self, step: int, agreed: AgreedStep) -> None:
        """After `step` steps. Raises Anomaly when the run has to be put back."""
        if self._plateau is not None and (flat := self._plateau.take(agreed.loss, agreed.rate >= _HIGH)) is not None:
            self.setting.emit("incident", kind="plateau", step=step, **_told(flat, self._plateau.window))
        if self._course is None:
            return
        verdict = self._course.take(step, agreed.loss, agreed.gradient_norm)
        if not self._common:
            self._found = self._found or verdict
            return
        self._hold(self._course.since)
        if verdict is not None:
            self._put_back(verdict)

    def compare(self) -> None:
        """Before all replicas save: what one of them has found is found by all. Raises Anomaly on all."""
        if self._course is None or self._common:
            return
        Given = tuple[dict[str, Any] | None, int | None]

        def first(given: list[Given]) -> list[Given]:
            verdicts = [verdict for verdict, _ in given if verdict is not None]
            since = [step for _, step in given if step is not None]
            worst = min(verdicts, key=lambda verdict: int(verdict["first"]), default=None)
            if worst is not None:
                worst = {**worst, "last": max(verdict["last"] for verdict in verdicts)}
            return [(worst, min(since, default=None))] * len(given)

        state = (None if self._found is None else asdict(self._found), self._course.since)
        self.saved.wait()  # its own agreements must not come in between
        verdict, since = self.saved.team.agree("comparing the replicas' losses", lambda: state, first)
        self._hold(since)
        if verdict is not None:
            self._put_back(Verdict(**verdict))

    def not_finite(self, step: int) -> None:
        """The step after `step` was not finite: the second time with the same batch, that is left out."""
        if self._course is None:
            return
        skips = self.skips.suspecting(self.skips.batch(step))
        rank = self.setting.place.rank
        if self._common:
            self._keep(skips)
        elif self.setting.mesh.members(rank, *REPLICA)[0] == rank:
            skip_list.write(self.folder, skips)  # the other replicas do not know, and are not waited for

    def _hold(self, since: int | None) -> None:
        """Checkpoints from before what may become an anomaly are kept."""
        self.saved.hold = None if since is None else since - 1

    def _put_back(self, verdict: Verdict) -> None:
        if self.setting.plan.optimizer_nodes:
            raise UserError(
                f"The {verdict.what} rose at step {verdict.first} and did not recover.",
                why="the run cannot be put back: an optimizer node's files hold its newest step only",
                do='faults.rollback = "never" goes on from there; or begin a new run with a lower '
                "train.optimizer.learning_rate",
            )
        self._keep(self.skips.without(verdict.first, verdict.last))
        raise Anomaly(
            f"The {verdict.what} rose at step {verdict.first} and did not recover.",
            why=f"{verdict}; the run rolls back to before that step and skips the batches of those steps",
            do='faults.rollback = "never" lets a run go on; a lower train.optimizer.learning_rate may prevent it',
        )

    def _keep(self, skips: Skips) -> None:
        """All ranks call it; the first writes, before any of them goes on or ends."""

        def written(_: list[None]) -> list[None]:
            skip_list.write(self.folder, skips)
            return [None] * self.saved.team.world

        self.saved.wait()
        self.saved.team.agree("noting what the run leaves out", lambda: None, written)
        self.skips = skips


def _told(flat: Fall, window: int) -> dict[str, Any]:
    """The fields of a plateau's incident besides its kind and step."""
    return {
        "what": f"The loss has not fallen in {window} steps: it stands at {flat.level:.4g}.",
        "why": f"by the line through them it fell {flat.fall:.2g}, give or take {flat.error:.2g}",
        "rank": -1,
        "action": "none; another learning rate or other data may help",
    }


def numbered(healing: Healing | None, step: int) -> int:
    """The number of the batch that `step` takes."""
    return step if healing is None else healing.skips.batch(step)
