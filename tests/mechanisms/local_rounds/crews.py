"""Replicas as threads over real Gloo groups, each with a small model of its own data; and what they should come to."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore

from espalier.comm.codecs import codec
from espalier.mechanisms.local_rounds.membership import MemberGroup, Members
from espalier.mechanisms.local_rounds.outer_loop import OuterSync
from espalier.mechanisms.local_rounds.round_length import Rounds
from espalier.optim.diloco_slowmo import OuterMethod

RATE = 0.05
SIZES = (7, 5, 11, 4, 6)


class Replica:
    """A model of five tensors, its own target, SGD with momentum inside. Has state."""

    def __init__(self, member: int, dtype: torch.dtype = torch.float64) -> None:
        start = torch.Generator().manual_seed(0)
        self.live = [torch.randn(size, generator=start, dtype=dtype) for size in SIZES]
        own = torch.Generator().manual_seed(100 + member)
        self.target = [torch.randn(size, generator=own, dtype=dtype) for size in SIZES]
        self.heavy = [torch.zeros_like(tensor) for tensor in self.live]
        self.draw = own
        self.momentum = 0.9

    def step(self, rate: float = RATE) -> None:
        """One local step towards this replica's target, through noise of its own."""
        for tensor, target, heavy in zip(self.live, self.target, self.heavy, strict=True):
            noise = torch.randn(tensor.shape, generator=self.draw, dtype=tensor.dtype)
            heavy.mul_(self.momentum).add_(tensor - target + 0.1 * noise)
            tensor.sub_(rate * heavy)

    def flat(self) -> Tensor:
        """A copy of all its parameters."""
        return torch.cat([tensor.clone() for tensor in self.live])


def together(count: int, run: Callable[[int, Callable[..., OuterSync]], Any], **crew: Any) -> list[Any]:
    """`run(member, make)` on as many threads; `make(replica, choices, rounds)` is this member's engine."""
    store, results, errors, engines = HashStore(), [None] * count, [], []

    def one(member: int) -> None:
        lives = itertools.count()

        def make(replica: Replica, choices: OuterMethod, rounds: Rounds, **more: Any) -> OuterSync:
            life = PrefixStore(f"life{next(lives)}", store)
            place = MemberGroup(life, member, tuple(range(count)), **{"timeout": 20.0, "grace": 1.0, **crew})
            engines.append(OuterSync(replica.live, choices, Members(place, codec(choices.codec)), rounds, **more))
            return engines[-1]

        try:
            results[member] = run(member, make)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(member,)) for member in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    while engines:
        engines.pop().close()  # else its thread keeps its group, with ten threads and sockets, as long as it lives
    gc.collect()
    if errors:
        raise errors[0]
    return results


def simulated(count: int, choices: OuterMethod, steps: int, rounds: int) -> list[Tensor]:
    """x after every round by the paper's recurrence, in one process, means in rank order. CO2 with delay 1, SlowMo with
    delay 0, eager and a penalty of the gap where asked, and rounds without delay first; no codec, one fragment."""
    replicas = [Replica(member) for member in range(count)]
    x = replicas[0].flat()
    starts, m, before, found, last = [x] * count, torch.zeros_like(x), None, [], torch.zeros_like(x)
    factor = choices.rate * (RATE if choices.scaled else 1.0)
    for number in range(rounds):
        ends = []
        for replica in replicas:
            for _ in range(steps):
                replica.step()
            ends.append(replica.flat())
        own = [start - end for start, end in zip(starts, ends, strict=True)]
        now = (starts, ends)
        at_once = choices.delay == 0 or number < choices.warm
        late = now if at_once else before
        if late is not None:
            x = x.clone()
            difference = _difference(choices, *late) / (RATE if choices.scaled else 1.0)
            if choices.penalty == "gap":
                m = torch.lerp(m, difference, 1 - choices.momentum)
                step = difference
                if not at_once:
                    step = difference.sub(last, alpha=choices.momentum / factor).add(m, alpha=choices.momentum)
            else:
                m = choices.momentum * m + difference
                step = torch.add(difference, m, alpha=choices.momentum) if choices.nesterov else m
            if choices.clip:
                step = step.clamp(-choices.clip, choices.clip)
            x = torch.sub(x, step, alpha=factor)
            last = step * (0.0 if at_once else factor)
        before = None if at_once else now
        starts = [x - one if choices.eager and not at_once else x.clone() for one in own]
        for replica, start in zip(replicas, starts, strict=True):
            for tensor, part in zip(replica.live, start.split(SIZES), strict=True):
                tensor.copy_(part)
        found.append(x.clone())
    return found


def _difference(choices: OuterMethod, starts: list[Tensor], ends: list[Tensor]) -> Tensor:
    """The mean in rank order of what travelled."""
    if choices.average == "parameters":
        return starts[0] - torch.stack(ends).sum(0) / len(ends)
    return torch.stack([start - end for start, end in zip(starts, ends, strict=True)]).sum(0) / len(ends)
