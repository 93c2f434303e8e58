"""Training across slow links: rounds beside an exchange at every step, four hosts with an uplink each.

    python bench/co2.py [--quick] [--seconds N] [--json FILE] [--rates 50,100] [--only KIND,...] [--torchft PYTHON]
    python bench/co2.py --equal STEPS [--quick] [--json FILE]
    python bench/co2.py --only learning [--quick] [--json FILE]

A decoder of 10.8 M parameters on real text (Python's library as bytes), 1,024 tokens for each host and step, AdamW.
Each contestant trains for as many seconds of its own, in fresh processes: DistributedDataParallel (PyTorch's Gloo);
the same exchanging as seldom as the rounds (`accumulated`), and with our int8 hook; Local SGD; torchft's DiLoCo, by a
Python that has torchft; CO2 and its eager form in full precision, whose rounds begin with the fewest steps that hide
the exchange and follow the measured waits, and the eager form in 4 bits with a link that is busy an eighth of the
time at most. DistributedDataParallel trains three times as long, since it takes so few steps. Two ceilings, each for
half as long: the same hosts exchanging nothing (`alone`), and the eager forms on links without a limit (`unlimited`).
All hosts share this machine's cores, so the kernel's time for TCP is part of every figure; it is told too. Needs root
(bench/netlab.py).

`learning`: what rounds of 8 steps learn beside data parallel training from equal tokens, 2,000 steps of four replicas,
three seeds, in one process (bench/co2_learning.py). Needs no links and no root.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from co2_learning import learning
from co2_rank import Outcome, Task
from espalier.comm.codecs import codec
from espalier.machine.cluster import Link
from espalier.mechanisms.local_rounds import cost
from netlab import Lab, Shape, first_said
from table import Row, arguments, interval, publish

HOSTS, DELAY = 4, 5e-3
DUTY = 1 / 8
OURS = ("co2", "eager", "eager int4")
KINDS = ("alone", "ddp", "accumulated", "int8", "local_sgd", "torchft", *OURS)
LONGER = {"ddp": 3.0, "alone": 0.5}
"""How many times as long as the others a kind trains."""


def run(task: Task, rate: float, python: str) -> Outcome:
    """`task` on every host of a lab."""
    command = [python, str(Path(__file__).parent / "co2_rank.py"), msgspec.json.encode(task).decode()]
    with Lab(Shape(nodes=HOSTS, hosts=1, rate=rate, delay=DELAY if rate else 0.0)) as lab:
        return msgspec.json.decode(first_said(lab.start(command)), type=Outcome)


def contestants(kinds: Sequence[str], task: Task, rate: float, torchft: str | None) -> dict[str, Outcome]:
    """What each did on links of `rate`; first what a step takes alone, which says how long rounds are."""
    found = {"alone": run(_as(task, "alone"), rate, sys.executable)}
    step = found["alone"].seconds / found["alone"].steps
    size, link = 4.0 * found["alone"].parameters, Link(bandwidth=rate / 8, latency=DELAY)
    flight = float(cost.flight_seconds(size, HOSTS, link))
    steps = cost.least_steps(flight, step)
    ratio = 4 * 2**20 / float(codec("int4").wire_bytes(2**20, 4))
    short = max(1, -(-int(1000 * flight / ratio) // int(1000 * DUTY * step)))
    print(f"a step alone {step:.2f} s, an exchange {flight:.1f} s: rounds of {steps}, with int4 of {short}", flush=True)
    for kind in kinds:
        if kind == "alone" or (kind == "torchft" and torchft is None):
            continue
        name, *coded = kind.split()
        changes = {"steps": short, "codec": coded[0]} if coded else {"steps": steps, "adapt": name in OURS}
        python = torchft if kind == "torchft" and torchft else sys.executable
        asked = _as(task, name, **changes)
        found[kind] = run(asked, rate, python)
        told(kind, found[kind])
        if name == "eager":
            ceiling = f"{kind}, unlimited"
            found[ceiling] = run(msgspec.structs.replace(asked, seconds=asked.seconds / 2), 0.0, python)
            told(ceiling, found[ceiling])
    return found


def _as(task: Task, kind: str, **changes: Any) -> Task:
    return msgspec.structs.replace(task, kind=kind, seconds=task.seconds * LONGER.get(kind, 1.0), **changes)


def told(kind: str, one: Outcome) -> None:
    """Prints what a contestant did."""
    _, tokens, loss = one.curve[-1]
    print(
        f"  {kind:21} {one.steps} steps in {one.seconds:.0f} s, {tokens / one.seconds:.0f} tokens/s, loss {loss:.3f}, "
        f"{one.sent / tokens * HOSTS:.0f} B/token, stood still {one.stood:.2f} s, kernel {one.kernel:.0f} s",
        flush=True,
    )


def speeds(one: Outcome) -> list[float]:
    """Tokens per second from one evaluation to the next."""
    return [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(one.curve)]


def at(curve: Sequence[tuple[float, int, float]], column: int, value: float) -> float:
    """The loss where a column (0: seconds, 1: tokens) has reached `value`, on the straight line between two points."""
    for a, b in itertools.pairwise(curve):
        if b[column] >= value:
            return a[2] + (b[2] - a[2]) * (value - a[column]) / (b[column] - a[column])
    return curve[-1][2]


def time_to(curve: Sequence[tuple[float, int, float]], loss: float) -> float:
    """Seconds until the loss is at most that; infinite when it never is."""
    for a, b in itertools.pairwise(curve):
        if b[2] <= loss:
            return a[0] + (b[0] - a[0]) * (a[2] - loss) / (a[2] - b[2]) if a[2] > loss else a[0]
    return float("inf")


def rows(case: str, found: dict[str, Outcome]) -> list[Row]:
    """The table of one rate: ours beside every other."""
    made = []
    for ours in (name for name in OURS if name in found):
        mine = found[ours]
        here = f"{case}, {ours}, rounds of {_steps(mine)}"
        for peer, theirs in found.items():
            if peer not in OURS and ("unlimited" not in peer or peer.startswith(f"{ours},")):
                made += _beside(here, mine, peer, theirs)
        made += _settled(here, mine)
        share = mine.stood / mine.seconds
        made.append(Row(f"{here}: share of time standing still", "goal", 0.02, share, 0.02 / max(share, 1e-9), "", "-"))
        kernel = [one.kernel / one.seconds for one in (found["alone"], mine)]
        made.append(Row(f"{here}: kernel's share of two cores", "alone", *kernel, kernel[0] / kernel[1], "cores", "-"))
    return made


def _settled(case: str, one: Outcome) -> list[Row]:
    """The share of the later half of its rounds that it stood still."""
    lengths = [b[0] - a[0] for a, b in itertools.pairwise(one.curve)]
    half = len(lengths) // 2
    share = sum(one.still[half:]) / sum(lengths[half:])
    shares = sorted(still / length for still, length in zip(one.still[half:], lengths[half:], strict=True))
    spread = f"{shares[0]:.3f}-{shares[-1]:.3f} of a round (n={len(shares)})"
    return [
        Row(
            f"{case}: share of time standing still, later half of the rounds",
            "goal",
            0.02,
            share,
            0.02 / max(share, 1e-9),
            "",
            spread,
        )
    ]


def _steps(one: Outcome) -> int:
    return round(one.steps / (len(one.curve) - 1))


def _beside(case: str, mine: Outcome, peer: str, theirs: Outcome) -> list[Row]:
    own, other = speeds(mine), statistics.median(speeds(theirs))
    low, high = (value / other for value in interval(own))
    speed = [one.curve[-1][1] / one.seconds for one in (theirs, mine)]
    spread = f"{low:.3f}-{high:.3f} (rounds, n={len(own)})"
    made = [Row(f"{case}: speed", peer, *speed, speed[1] / speed[0], "tokens/s", spread)]
    if peer == "alone" or "unlimited" in peer:
        return made
    sent = [one.sent / one.curve[-1][1] * HOSTS for one in (theirs, mine)]
    made.append(Row(f"{case}: sent", peer, *sent, sent[0] / sent[1], "B/token", "-"))
    tokens = min(one.curve[-1][1] for one in (mine, theirs))
    losses = [at(one.curve, 1, tokens) for one in (theirs, mine)]
    made.append(Row(f"{case}: loss after {tokens} tokens", peer, *losses, losses[0] / losses[1], "nats", "-"))
    seconds = min(one.seconds for one in (mine, theirs))
    losses = [at(one.curve, 0, seconds) for one in (theirs, mine)]
    made.append(Row(f"{case}: loss after {seconds:.0f} s", peer, *losses, losses[0] / losses[1], "nats", "-"))
    goal = max(one.curve[-1][2] for one in (mine, theirs))
    times = [time_to(one.curve, goal) for one in (theirs, mine)]
    made.append(Row(f"{case}: time to loss {goal:.3f}", peer, *times, times[0] / times[1], "s", "-"))
    return made


def equal(task: Task, steps: int, length: int) -> list[Row]:
    """What methods by rounds of `length` learn from the same tokens, each to its end. On links without a limit: what is
    computed depends on no link and on no timing."""
    endless = msgspec.structs.replace(task, seconds=1e9, most=steps, steps=length)
    found = {}
    for kind in ("local_sgd", *OURS):
        name, *coded = kind.split()
        asked = msgspec.structs.replace(endless, kind=name, codec=coded[0] if coded else "exact")
        found[kind] = run(asked, 0.0, sys.executable)
        told(kind, found[kind])
    theirs = found["local_sgd"].curve[-1]
    case = f"{found['local_sgd'].parameters / 1e6:.1f} M, rounds of {length}"
    return [
        Row(
            f"{case}, {ours}: loss when all are trained for {theirs[1]} tokens", "local_sgd", theirs[2], one[2],
            theirs[2] / one[2], "nats", "-",
        )
        for ours, one in ((ours, found[ours].curve[-1]) for ours in OURS)
    ]  # fmt: skip


def main() -> None:
    """Runs what is asked and prints the table."""
    asked = arguments(
        __doc__ or "",
        seconds={"type": float, "help": "of training for each contestant"},
        rates={"help": "Mbit/s of a host's uplink (default: 50,100; with --quick 50)"},
        only={"default": ",".join(KINDS)},
        equal={"type": int, "metavar": "STEPS", "help": "only what is learnt in so many local steps"},
        torchft={"metavar": "PYTHON", "help": "an interpreter that has torchft; without it that row is left out"},
    )
    depth, width, held = (3, 256, 16) if asked.quick else (6, 384, 32)
    seconds = asked.seconds or (25.0 if asked.quick else 150.0)
    task = Task("alone", depth, width, sequence=128, batch=8, steps=1, seconds=seconds, held_out=held)
    note = ", quick" if asked.quick else ""
    made: list[Row] = []
    if asked.only == "learning":
        publish(learning(240 if asked.quick else 2000, (1, 2, 3)), asked.json)
        return
    if asked.equal:
        publish(equal(task, asked.equal, 4), asked.json)
        return
    try:
        for rate in map(float, (asked.rates or ("50" if asked.quick else "50,100")).split(",")):
            found = contestants(asked.only.split(","), task, rate * 1e6, asked.torchft)
            made += rows(f"{found['alone'].parameters / 1e6:.1f} M, {rate:g} Mbit/s{note}", found)
    finally:
        publish(made, asked.json)


if __name__ == "__main__":
    main()
