"""The training loop, one for every workload: `Trainer.run` is the whole run, top to bottom."""

from __future__ import annotations

import contextlib
import itertools
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from espalier import comm
from espalier.checkpoint import save_and_restore as checkpoints
from espalier.checkpoint.in_memory import Memory, take_up
from espalier.checkpoint.save_interval import Pace
from espalier.comm.base import Meter, Traffic, traffic
from espalier.comm.plain_collectives import RankGroup
from espalier.kernels import accelerator
from espalier.machine import malloc_trim
from espalier.machine.peak_memory import memory_of
from espalier.optim import schedules
from espalier.parallel.agreement import AgreedStep
from espalier.parallel.mesh import REPLICA, ProcessMesh
from espalier.parallel.workload import Shard, to_device
from espalier.plan.base import RoundsState
from espalier.recipe.errors import Anomaly, EspalierError, Interrupted, PeerLost, UserError
from espalier.track import events
from espalier.train.build import build
from espalier.train.mechanism import Choose
from espalier.train.rank_setup import RankSetup
from espalier.train.rollback import Healing, numbered
from espalier.train.signal_handling import handling
from espalier.train.table import TABLE, ordered

if TYPE_CHECKING:
    from espalier.store.artifacts import Artifact

_Result = TypeVar("_Result")


class Trainer:
    """One run on one rank. Has state: the model, the optimizer and the number of the next step."""

    def __init__(self, setting: RankSetup, channel: RankGroup, table: Sequence[Choose] = TABLE) -> None:
        self.setting = setting
        self.workload = setting.workload
        self.total, self.steps = setting.recipe.train.steps or 0, self.workload.phases()[-1].stop
        self.step = self.level = self.tokens = self.kept = 0
        self.mesh = ProcessMesh(setting.mesh, channel, setting.place.rank)
        self.built = build(setting, self.mesh, ordered(setting.recipe, setting.plan, table))
        self.sent = Meter(channel)
        self.context = self.built.context.forward
        self.memory: Memory | None = None
        self.pace: Pace | None = None
        self.healing: Healing | None = None
        self.stopping = False
        self.source = ""
        self.reported: Mapping[str, Any] = {}
        work = self.workload.work(self.workload.global_batch, "none", setting.plan.precision)
        self.step_flops = float(work.model_flops)
        self.step_tokens = float(work.tokens)

    # --- one step ------------------------------------------------------------------------------------------------

    def train_step(self, batches: Sequence[Any]) -> AgreedStep:
        """Forward, backward, exchange, update; again where a mechanism has lost the step."""
        return self._whole(lambda: self._step(batches))

    def _whole(self, action: Callable[[], _Result]) -> _Result:
        """What `action` returns, which needs the state after `self.step` steps. What a mechanism has lost of these is
        made again, to the same bits, and `action` is then called again."""
        due = self.step
        while True:
            try:
                while self.step < due:
                    batches = self.workload.batches(numbered(self.healing, self.step), self.setting.shard)
                    self._step([to_device(batch, self.setting.device) for batch in batches])
                return action()
            except EspalierError as error:
                step = self.built.recovered(error)
                if step is None or step > due:
                    raise
                self.tokens -= round(self.step_tokens * (self.step - step))
                self.step = step

    def _step(self, batches: Sequence[Any]) -> AgreedStep:
        """Randomness is a pure function of (seed, step, rank), the same for ranks that share matrices."""
        recipe = self.setting.recipe
        rank = self.mesh.mesh.members(self.setting.place.rank, "tp")[0]
        seed_step(self.setting.device, hash((recipe.train.seed, self.step, rank)) & 0x7FFF_FFFF_FFFF_FFFF)
        if not self.built.model.training:
            self.built.model.train()
        stalled = self.built.context.stalled
        with comm.phase("forward and backward"):
            self.built.sharding.clear()
            before = stalled()
            outcome = self.built.schedule.run(self.built.model, batches, self.workload.loss)
            waited = stalled() - before
        with comm.phase("agreement"):
            rate = schedules.factor(recipe.train.schedule, self.step, self.total)
            following = min(self.built.agreement.following(self.step), self.steps)
            agreed = self.built.agreement.step(outcome, rate, self.stopping)
            if following == self.steps:
                self.built.agreement.finish(rate)
        if agreed.faulty or not (agreed.skipped or math.isfinite(agreed.gradient_norm)):
            raise not_finite(self, agreed, batches)
        for follow in self.built.context.follow_loss:
            follow([agreed.loss])
        self.tokens += round(self.step_tokens * (following - self.step))
        self.step = following
        return agreed._replace(exposed=agreed.exposed + waited)

    def sum(self, values: torch.Tensor, group: RankGroup) -> None:
        """Adds `values` up over the ranks of `group`, in place."""
        if group is not None:
            with traffic(Traffic.CONTROL):
                dist.all_reduce(values, group=group)

    def mean(self, values: torch.Tensor) -> None:
        """Replaces `values` by their mean over all trainers."""
        self.sum(values, self.mesh.trainers)
        values /= len(self.setting.mesh.trainers)

    # --- the run -------------------------------------------------------------------------------------------------

    def run(self, saved: checkpoints.Checkpoints | None = None) -> None:
        """Trains from `self.step` to the end, validating and saving on the way. Raises Interrupted after Ctrl-C."""
        signals = handling(self._stop, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        with signals, self._profile() as profile, self.feed() as feed:
            if self.level < self.step:
                self._between(saved)  # a failure came in between
            first = self.step
            for batches, waited in feed:
                begun = time.perf_counter()
                before = self.step
                agreed = self.train_step(batches)
                profile()
                self._report(agreed, time.perf_counter() - begun + waited, waited)
                self.setting.place.pulse.stepped(self.step, agreed.exposed)
                if self.healing is not None and not agreed.skipped:
                    self.healing.watch(self.step, agreed)
                self._between(saved, agreed.stop)
                if (
                    regular := self.step // malloc_trim.EVERY > before // malloc_trim.EVERY
                ) or self.step - first < malloc_trim.EVERY:
                    self.setting.place.recall.look()  # groups are made where they are first used: mostly in these steps
                if regular:
                    malloc_trim.give_back()

    def _between(self, saved: checkpoints.Checkpoints | None, asked: bool = False) -> None:
        """Validates, saves and copies the state after `self.step` steps where that is due, and all ranks are there.
        `asked`: some rank asked to stop. Raises Interrupted; PeerLost where ranks are to meet anew."""
        recipe = self.setting.recipe
        pulse = self.setting.place.pulse
        agreement = self.built.agreement
        if agreement.leaving or (self.step == self.steps and not agreement.whole):
            raise PeerLost(f"This rank stops after step {self.step} to re-initialize its process group.")
        if not (agreement.level and agreement.whole):
            return
        with pulse.elsewhere("validating"):
            loss = self._whole(self.validate) if self._due(recipe.train.validate_every) else None
        stop = asked or self.level < (self.setting.stop_after or 0) <= self.step
        if saved is not None and (stop or self._saves(loss is not None)):
            with pulse.elsewhere(saved.doing):
                self._whole(self.built.sharding.settle)
                self.save(saved, loss, wait=stop)
        if stop and self.step < self.total:
            raise self._interrupted(saved)
        if self.memory is not None and self.step < self.steps:
            self.memory.after(self.step, self.parts, self.meta(), self.mean)
        self.level = self.step

    def _due(self, every: int | None) -> bool:
        """Whether a multiple of `every` steps was reached since all replicas were at one step last."""
        return self.step == self.steps or (every is not None and every > 0 and self.step // every > self.level // every)

    def _saves(self, validated: bool) -> bool:
        if self.pace is not None:
            return self.step == self.steps or self.pace.due(self.step, validated)
        return self._due(None if (every := self.setting.recipe.checkpoint.every) == "auto" else every)

    def feed(self) -> contextlib.AbstractContextManager[Iterator[tuple[Sequence[Any], float]]]:
        """(batches, seconds waited for them) of each remaining step."""
        shard = self.setting.shard
        device = self.setting.device

        def numbers() -> Iterator[int]:
            step = self.step
            while step < self.steps:
                yield step
                step = self.built.agreement.following(self.step)

        def there(batches: Sequence[Any]) -> Sequence[Any]:
            return [to_device(batch, device) for batch in batches]

        def make(step: int) -> Sequence[Any]:
            return self.workload.batches(numbered(self.healing, step), shard)

        return ahead(numbers(), make, there, self.setting.place.pulse.elsewhere)

    def _report(self, agreed: AgreedStep, seconds: float, waited: float) -> None:
        setting = self.setting
        rate = self.setting.recipe.train.optimizer.learning_rate or 0.0
        fields: dict[str, Any] = {
            "step": self.step,
            "loss": agreed.loss,
            "tokens": round(self.step_tokens),
            "seconds": seconds,
            "mfu": self.step_flops / seconds / setting.flops_per_second if setting.flops_per_second else None,
            "learning_rate": rate * agreed.rate,
            "gradient_norm": agreed.gradient_norm,
            **memory_of(setting.device),
            **self.sent.read(),
            "exposed": agreed.exposed,
            "waited": waited,
        }
        if (scale := self.built.context.loss_scale) is not None:
            fields |= {"loss_scale": scale.factor, "skipped": scale.skipped}
        if agreed.tasks:
            fields["tasks"] = dict(zip(self.workload.tasks(), agreed.tasks, strict=True))
        fields |= {name: read() for name, read in self.built.context.meters.items()}
        self.reported = fields
        setting.emit("step", **fields)
        if self.pace is not None:
            self.pace.clock(self.step, seconds)

    @torch.no_grad()
    def validate(self) -> float | None:
        """Held-out loss over all ranks, or None when there is nothing held out."""
        begun = time.perf_counter()
        samples = self.workload.validation_samples()
        part = self.setting.mesh.data_part(self.setting.place.rank)
        if samples == 0:
            return None
        self.built.model.eval()
        self.built.sharding.clear()  # gradients of the step before, whose room this takes
        ends = [samples * index // part.total for index in range(part.total + 1)]
        size = self.setting.plan.micro_batch
        slot = self.setting.mesh.sequence_part(self.setting.place.rank)
        shards = [Shard(start, stop, size, *slot) for start, stop in itertools.pairwise(ends)]
        shown = self.built.agreement.shown()
        with comm.phase("validation"), self.context(), shown, self.built.schedule.validation():
            sums = self.workload.evaluate(self.built.model, shards[part.number])
            fewer = max(len(shard.cuts) for shard in shards) - len(shards[part.number].cuts)
            self.built.sharding.idle(fewer * len(self.workload.tasks()))
            names = sorted(sums)
            totals = torch.tensor([sums[name] for name in names], dtype=torch.float64)
            self.sum(
                totals if self.setting.mesh.counts(self.setting.place.rank) else totals.zero_(), self.mesh.trainers
            )
        means = {name: float(totals[i, 0] / totals[i, 1]) for i, name in enumerate(names)}
        seconds = time.perf_counter() - begun
        self.setting.emit("validation", step=self.step, seconds=seconds, **self.workload.summary(means))
        return means.get("loss")

    @torch.no_grad()
    def sample(self) -> Sequence[Artifact]:
        """What the model shows now: rank 0 asks, and the others too where a forward pass needs them."""
        asked = self.built.sharding.together or not self.setting.place.rank
        asked = asked and self.setting.recipe.track.sample is not False
        self.built.model.eval()
        return self._whole(lambda: self.workload.sample(self.built.model)) if asked else []

    # --- saving --------------------------------------------------------------------------------------------------

    def parts(self) -> Mapping[str, Any]:
        """Everything that has state, by name."""
        return self.built.parts()

    def save(self, saved: checkpoints.Checkpoints, loss: float | None, wait: bool) -> None:
        """Saves the state after `self.step` steps."""
        if self.healing is not None:
            self.healing.compare()
        with comm.phase("saving"):
            stood = saved.save(self.step, self.parts(), self.meta(), loss, wait=wait or self.step == self.steps)
            self.kept = self.step
            if self.pace is not None:
                self.pace.saved(self.step, stood)

    def meta(self) -> dict[str, int]:
        """What a copy of the state says of it."""
        phase = self.workload.phases()[0].start
        return {"step": self.step, "tokens": self.tokens, **({"phase": phase} if phase else {})}

    def restore(self, saved: checkpoints.Checkpoints) -> None:
        """Takes up the newest good state, in memory or saved, if there is one. A new run has none."""
        if self.setting.new:
            return
        with comm.phase("restoring"):
            most = None if self.healing is None else self.healing.skips.back_to
            most = most if most is None else max(most, self.workload.phases()[0].start)
            parts = self.parts()
            if self.setting.recipe.tasks:  # some may have come since, and others gone
                from espalier.checkpoint.all_names import OwnNames

                parts = {name: OwnNames(part) for name, part in parts.items()}
            loaded, self.source = take_up(self.memory, saved, parts, most)
        if loaded is not None:
            self.step = int(loaded.meta["step"])
            self.tokens = int(loaded.meta["tokens"])
            self.kept = self.step if self.source.startswith("disk") else 0
            level = int(loaded.meta.get("level", self.step))
            self.level = saved.team.agree("what is left to do", lambda: level, lambda all_: [min(all_)] * len(all_))
            self.built.agreement.at(self.step)
            if (report := loaded.meta.get("report")) and self.setting.folder is not None:
                logged = events.last(self.setting.folder / events.NAME, "step")
                if logged is None or logged["step"] < report["step"]:  # the rank that logs was lost before it did
                    self.setting.emit("step", **report)
        self._go_on(most)
        if self.healing is not None:
            self.healing.began(self.step)

    def _go_on(self, most: int | None) -> None:
        """From a state that outlived the ranks, where there is one. What is due after its step is done again, where no
        checkpoint says that it was. Raises UserError where it is of a later step than `most`."""
        step = self.built.resumed()
        if step is None:
            return
        if most is not None and step > most:
            raise UserError(
                f"The run is to go back to step {most}, and its optimizer node is at step {step}.",
                why="a node keeps the state of its last step only",
                do='faults.rollback = "never" and a lower train.optimizer.learning_rate, in a new run',
            )
        if self.step != step:  # no checkpoint ends it: what is due after it may not be done
            self.level = max(0, step - self.setting.plan.state(RoundsState).steps)
        self.step = step
        self.tokens = round(self.step_tokens * step)
        self.built.agreement.at(step)

    # --- the end and the profile -------------------------------------------------------------------------------------

    def _stop(self, number: int, frame: Any) -> None:
        """Ends the run after this step, in place of what the signal would do."""
        self.stopping = True
        self.setting.place.pulse.asked()

    @contextlib.contextmanager
    def _profile(self) -> Iterator[Callable[[], None]]:
        wanted = self.setting.recipe.track.profile
        folder = self.setting.folder
        if wanted is None or folder is None or self.setting.place.rank != 0:
            yield lambda: None
            return
        from espalier.track.trace import StepProfiler

        with StepProfiler(*wanted, folder / "trace.json", first_step=self.step) as profile:
            yield profile.step

    def _interrupted(self, saved: checkpoints.Checkpoints | None) -> Interrupted:
        return Interrupted(
            f"Stopped after step {self.step} of {self.total}; the state is {'' if saved is not None else 'not '}saved.",
            do="run the same command again to go on",
        )


# --- a loss or gradient that is not a finite number -------------------------------------------------------------------


def not_finite(trainer: Trainer, agreed: AgreedStep, batches: Sequence[Any]) -> Anomaly:
    """The error of the step after `trainer.step`, in which nothing was updated: it names the ranks where a loss or a
    gradient is not finite, and the documents of their batches. All ranks call it."""
    faulty = agreed.faulty
    what = "loss"
    setting = trainer.setting
    workload = trainer.workload
    if not faulty:
        faulty = _ranks_with_bad_gradients(trainer, batches)
        what = "gradient"
    replica = setting.mesh.members(setting.place.rank, *REPLICA)
    faulty = tuple(replica[rank] for rank in faulty)
    start, stop = setting.plan.ranks[faulty[0]].share if faulty else (0, workload.global_batch)
    number = numbered(trainer.healing, trainer.step)
    if trainer.healing is not None:
        trainer.healing.not_finite(trainer.step)
    names = workload.documents(number, Shard(start, stop, setting.plan.micro_batch))
    shown = ", ".join(list(dict.fromkeys(names))[:5])
    who = f"rank {', '.join(map(str, faulty))}" if faulty else "the sum over ranks"
    return Anomaly(
        f"The {what} is not finite in step {trainer.step + 1} on {who}.",
        why=f"that batch came from {shown}",
        do="lower the learning rate, or look at those documents"
        + (f"; the checkpoint of step {trainer.kept} is kept" if trainer.kept else ""),
    )


def _ranks_with_bad_gradients(trainer: Trainer, batches: Sequence[Any]) -> tuple[int, ...]:
    built = trainer.built
    built.sharding.clear()
    apart = built.schedule.apart(lambda last: built.sharding.alone())
    apart.run(built.model, batches, trainer.workload.loss)
    norm = torch.nn.utils.get_total_norm([p.grad for p in built.model.parameters() if p.grad is not None])
    group = trainer.mesh.replica
    flags = torch.zeros(1 if group is None else group.size())
    flags[0 if group is None else group.rank()] = float(not torch.isfinite(norm))
    trainer.sum(flags, group)
    return tuple(int(rank) for rank in flags.nonzero().flatten())


# --- batches ahead, seeds ------------------------------------------------------------------------------------


@contextlib.contextmanager
def ahead(
    numbers: Iterator[int],
    make: Callable[[int], Any],
    finish: Callable[[Any], Any],
    waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Iterator[Iterator[tuple[Any, float]]]:
    """Gives an iterator of (`finish(make(n))`, seconds waited) for each of `numbers`, made one ahead in a thread.

    The next of `numbers` is asked for once the one before is ready, `finish` runs in the caller's thread. Waits take
    place inside `waiting()`.
    """

    def all_of_them(pool: ThreadPoolExecutor) -> Iterator[tuple[Any, float]]:
        coming = (pool.submit(make, number) for number in numbers)
        under_way = next(coming, None)
        while under_way is not None:
            begun = time.perf_counter()
            with waiting():
                made = finish(under_way.result())
            waited = time.perf_counter() - begun
            under_way = next(coming, None)
            yield made, waited

    with ThreadPoolExecutor(1, thread_name_prefix="feed") as pool:
        yield all_of_them(pool)


def seed_step(device: torch.device, seed: int) -> None:
    """Seeds the generators a step can draw from. `torch.manual_seed` would, without a GPU in use, queue a call with its
    stack trace for later at every step."""
    torch.default_generator.manual_seed(seed)
    if accelerator.is_on(device):
        accelerator.seed(seed)
