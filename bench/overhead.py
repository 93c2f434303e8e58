"""What the machinery costs one rank: our training step with all degrees 1 beside the loop that a user would write.

    python bench/overhead.py [--quick] [--pairs N] [--json FILE] [--only 4M,tiny]

Both train Espalier's own decoder on the same tokens in one process and one thread, so that only the machinery differs:
the Trainer with a plan whose list of stages, sharding factors and codecs are all there and do nothing, and a loop of
forward, backward, clipping and fused AdamW that reads its loss. They take turns of several steps. One thread
computes, and its processor time counts: whatever else runs on the machine matters less.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from cuts_rank import CLOSE, Cut, RandomTokens, Task
from espalier.machine.malloc_trim import keep_freed
from espalier.plan import base as plans
from espalier.train import rank_spec as launch
from espalier.train.rank_setup import RankSetup
from espalier.train.trainer import Trainer
from table import Row, arguments, compare, publish

TASKS = {
    "4M": Task(Cut(), batch=4, sequence=256),
    "tiny": Task(Cut(), batch=8, sequence=64, depth=2, width=64, heads=2, kv_heads=2, vocabulary=256),
}
TURN = 0.6
"""Seconds of a turn, about."""
BUFFERS = 50


class PlainLoop:
    """The loop, in its own words."""

    def __init__(self, workload: RandomTokens) -> None:
        self.model: Any = workload.build(torch.device("cpu"), torch.float32)
        options: Any = workload.recipe.train.optimizer
        every = list(self.model.parameters())
        groups = [
            {"params": [one for one in every if one.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [one for one in every if one.ndim == 1], "weight_decay": 0.0},
        ]
        rates = {"lr": options.learning_rate, "betas": options.betas, "eps": options.epsilon}
        self.optimizer = torch.optim.AdamW(groups, fused=True, **rates)
        self.tokens = workload.global_batch * workload.sequence

    def step(self, batch: Any) -> float:
        """Of one batch; its loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model.loss_sum(*batch) / self.tokens
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()


class Planned:
    """The Trainer with a plan of one rank that names its only stage."""

    def __init__(self, workload: RandomTokens) -> None:
        depth = workload.options.depth or 0
        stage = plans.Stage(ranks=(0,), layers=(0, depth))
        unit = plans.Unit(params=(0,), grads=(0,), optimizer=(0,))
        plan = plans.Plan(
            ranks=(plans.Rank(share=(0, workload.global_batch)),),
            stages=(stage,),
            units=(unit,),
            exchanges=(plans.Exchange(traffic="gradients"), plans.Exchange(traffic="activations")),
            micro_batch=workload.global_batch,
        )
        self.setting = RankSetup(workload.recipe, plan, workload, launch.RankSpec())
        self.trainer = Trainer(self.setting, None)

    def step(self, batch: Any) -> float:
        """Of one batch; its loss."""
        return self.trainer.train_step([batch]).loss


def row_of(name: str, pairs: int, note: str) -> Row:
    """Both in turn, `pairs` times."""
    workload = RandomTokens(TASKS[name].recipe())
    ours, plain = Planned(workload), PlainLoop(workload)
    batches = [workload.batches(number, ours.setting.shard)[0] for number in range(BUFFERS)]
    done, losses = {"ours": 0, "plain": 0}, {"ours": 0.0, "plain": 0.0}

    def turn(who: str, runner: Any, steps: int) -> float:
        begun = time.process_time()
        for number in range(done[who], done[who] + steps):
            losses[who] = runner.step(batches[number % BUFFERS])
        done[who] += steps
        return (time.process_time() - begun) / steps

    turn("plain", plain, 3)
    turn("ours", ours, 3)
    steps = max(3, int(TURN / turn("plain", plain, 3)))
    turn("ours", ours, 3)
    assert abs(losses["ours"] / losses["plain"] - 1) < CLOSE, f"contestants do not train alike: {losses}"
    found = []
    for number in range(pairs):
        both = [("ours", ours), ("plain", plain)]
        taken = {who: turn(who, runner, steps) for who, runner in (both if number % 2 else both[::-1])}
        found.append((1e3 * taken["ours"], 1e3 * taken["plain"]))
    parameters = sum(one.numel() for one in plain.model.parameters())
    case = f"one rank, all degrees 1: {name}, {parameters / 1e6:.1f} M, {workload.global_batch} x {workload.sequence}"
    print(f"  {case}: {steps} steps a turn; losses {losses['ours']:.4f} and {losses['plain']:.4f}")
    return compare(f"{case} tokens{note}", "plain loop", "ms of processor/step", found, higher_is_better=False)


def main() -> None:
    """Runs the cases and prints their rows."""
    asked = arguments((__doc__ or "").splitlines()[0], only={"default": ",".join(TASKS), "help": "sizes, with commas"})
    torch.set_num_threads(1)
    keep_freed()
    pairs, note = (asked.pairs or 5, ", quick") if asked.quick else (asked.pairs or 31, "")
    rows: list[Row] = []
    try:
        for name in asked.only.split(","):
            rows.append(row_of(name, pairs, note))
    finally:
        publish(rows, asked.json)  # what is known when it is told to end


if __name__ == "__main__":
    main()
