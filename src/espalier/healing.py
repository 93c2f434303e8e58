"""What a run does about its own loss: an anomaly that does not heal puts it back and leaves the batches out.

After Acme (arXiv 2403.07648), section 6.1. The verdict is a function of losses that all ranks know, so all reach it
after the same step without asking each other; `resilience.acme.anomaly` has the rule. The attempt then ends, and
whoever started it starts it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from espalier.checkpoint.sharded import Checkpoints
from espalier.errors import Anomaly
from espalier.resilience.acme import skipping
from espalier.resilience.acme.anomaly import Losses
from espalier.resilience.acme.skipping import Skips

if TYPE_CHECKING:
    from espalier.trainer import Setting


class Healing:
    """One attempt's view of what the run leaves out. Has state: that list, and the losses so far.

    All ranks make it, and hold the same.
    """

    def __init__(self, setting: Setting, saved: Checkpoints) -> None:
        assert setting.folder is not None, "only a run with a folder can be put back"
        self.folder, self.saved = setting.folder, saved
        wanted = setting.recipe.faults.rollback
        # Replicas that agree by rounds have losses of their own in between.
        self._losses = None if wanted == "never" or setting.plan.outer is not None else Losses(wanted)

        def told(_: list[None]) -> list[Skips]:
            return [skipping.read(self.folder)] * saved.team.world

        self.skips = saved.team.agree("reading what the run leaves out", lambda: None, told)

    def began(self, step: int) -> None:
        """The run goes on from `step`. What it was put back from is removed."""
        if self.skips.back_to is None:
            return
        self.saved.forget(step)
        self._keep(self.skips.settled())

    def watch(self, step: int, loss: float) -> None:
        """After `step` steps. Raises Anomaly when the run has to be put back."""
        if self._losses is None:
            return
        verdict = self._losses.take(step, loss)
        self.saved.hold = None if self._losses.since is None else self._losses.since - 1
        if verdict is None:
            return
        self._keep(self.skips.without(verdict.first, verdict.last))
        raise Anomaly(
            f"The loss rose at step {verdict.first} and did not come back.",
            why=f"{verdict}; the run is put back before that, and the batches of those steps are left out",
            do='faults.rollback = "never" lets a run go on; a lower train.optimizer.learning_rate may prevent it',
        )

    def not_finite(self, step: int) -> None:
        """The step after `step` was not finite: the second time with the same batch, that is left out."""
        if self._losses is not None:
            self._keep(self.skips.suspecting(self.skips.batch(step)))

    def _keep(self, skips: Skips) -> None:
        """All ranks call it; the first writes, before any of them goes on or ends."""

        def written(_: list[None]) -> list[None]:
            skipping.write(self.folder, skips)
            return [None] * self.saved.team.world

        self.saved.wait()
        self.saved.team.agree("noting what the run leaves out", lambda: None, written)
        self.skips = skips


def numbered(healing: Healing | None, step: int) -> int:
    """The number of the batch that `step` takes."""
    return step if healing is None else healing.skips.batch(step)
