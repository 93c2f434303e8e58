"""Faulty-node search in two rounds of small all-gathers. After Acme (arXiv 2403.07648), section 6.1.

First round: nodes in worlds of two (one of three), all at once; who passes is good. Second round: each suspect with a
good node; who fails again is faulty. Two collectives of two nodes, however many nodes there are, while a search by
halves needs more rounds and one bad node spoils each half. Where we deviate: a pair that fails although both of its
nodes pass with others is reported as a faulty link; and where no world passes at all, each node is tried alone first.

`locate` is the rule alone; `lead` and `follow` carry it out over Gloo, in groups of their own on any store, each with
its own deadline, never in the group of a training run. A roll is called first: no wave waits for a node that is only
slow to start, and one that never answers spends no wave.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

World = tuple[int, ...]
Test = Callable[[list[World]], list[bool]]
"""Runs the worlds of one wave, all at once; whether each passed."""

_NUMBERS = 1 << 16  # float32 numbers that each node contributes: a quarter of a MiB


@dataclass(frozen=True)
class Located:
    """What was found: faulty nodes, pairs whose link is faulty, and the waves it took."""

    faulty: tuple[int, ...]
    links: tuple[World, ...]
    waves: int


def locate(nodes: Sequence[int], test: Test) -> Located:
    """The faulty ones among two or more `nodes`, in at most 2 + ceil(suspects / good) waves.

    Sound where a world passes if and only if none of its nodes is faulty, and one node is good.
    """
    worlds = _pairs(nodes)
    passed = test(worlds)
    waves = 1
    good = [node for world, fine in zip(worlds, passed, strict=True) if fine for node in world]
    if not good:
        waves += 1
        alone: list[World] = [(node,) for node in nodes]
        good = [world[0] for world, fine in zip(alone, test(alone), strict=True) if fine]
        if not good:
            return Located(tuple(nodes), (), waves)
    suspects = [node for node in nodes if node not in good]
    faulty: list[int] = []
    for first in range(0, len(suspects), len(good)):
        wave: list[World] = [(suspect, partner) for suspect, partner in zip(suspects[first:], good, strict=False)]
        faulty += [world[0] for world, fine in zip(wave, test(wave), strict=True) if not fine]
        waves += 1
    links = [
        world
        for world, fine in zip(worlds, passed, strict=True)
        if not fine and len(world) == 2 and not set(world) & set(faulty)
    ]
    return Located(tuple(sorted(faulty)), tuple(links), waves)


def _pairs(nodes: Sequence[int]) -> list[World]:
    """Worlds of two, the last one of three where their number is odd."""
    worlds: list[World] = [tuple(nodes[first : first + 2]) for first in range(0, len(nodes) - 1, 2)]
    if len(nodes) % 2 and worlds:
        worlds[-1] = (*worlds[-1], nodes[-1])
    return worlds or [tuple(nodes)]


# --- for real --------------------------------------------------------------------------------------------------------


def lead(store: Any, nodes: Sequence[int], seconds: float) -> Located:
    """Finds the faulty ones among `nodes`, each of which calls `follow` on the same torch Store.

    A node that does not report within `seconds`, or gives no answer within `seconds` of a wave's begin, has failed.
    """
    wave = 0

    def test(worlds: list[World]) -> list[bool]:
        nonlocal wave
        wave += 1
        store.set(f"wave{wave}", json.dumps(worlds))
        deadline = time.monotonic() + seconds
        answers = [[_answer(store, f"wave{wave}/{node}", deadline) for node in world] for world in worlds]
        return [all(answer == b"passed" for answer in world) for world in answers]

    try:
        deadline = time.monotonic() + seconds
        absent = [node for node in nodes if _answer(store, f"here/{node}", deadline) is None]
        present = [node for node in nodes if node not in absent]
        located = locate(present, test) if present else Located((), (), 0)
        return replace(located, faulty=tuple(sorted({*located.faulty, *absent})))
    finally:
        store.set(f"wave{wave + 1}", "[]")


def _answer(store: Any, key: str, deadline: float) -> bytes | None:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return bytes(store.get(key))


def follow(store: Any, node: int, seconds: float, patience: float = 600.0) -> None:
    """Reports, then takes part as `node` until `lead` has found everything. `seconds`: for each all-gather; `patience`:
    for the next wave, after which torch's DistStoreError is raised."""
    import torch  # noqa: F401  # before it reports: no wave waits for that

    store.set(f"here/{node}", "")
    wave = 1
    while True:
        store.wait([f"wave{wave}"], timedelta(seconds=patience))
        worlds: list[list[int]] = json.loads(store.get(f"wave{wave}"))
        if not worlds:
            return
        world = next((world for world in worlds if node in world), None)
        over = store.check([f"wave{wave + 1}"])  # it was held up: nobody waits in that world any more
        if world is not None and not over:
            group = (store, f"wave{wave}/of{world[0]}", world.index(node), len(world), seconds)
            store.set(f"wave{wave}/{node}", "passed" if _in_time(group, seconds) else "failed")
        wave += 1


def _in_time(group: tuple[Any, ...], seconds: float) -> bool:
    """Whether its world has passed. On a thread that is left to itself after `seconds`: Gloo goes on connecting to a
    peer that has given up for several times its own deadline, and the next wave does not wait."""
    passed = []

    def work() -> None:
        with suppress(Exception):  # whatever it was, this world has failed
            passed.append(gathers(*group))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return passed == [True]


def gathers(store: Any, key: str, rank: int, world: int, seconds: float) -> bool:
    """Whether an all-gather of known numbers over a new Gloo group brings what each rank must have sent.

    Raises what torch raises where the others do not answer within `seconds`.
    """
    import torch
    from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

    limit = timedelta(seconds=seconds)
    group: Any = ProcessGroupGloo(PrefixStore(f"{key}/", store), rank, world, limit)
    gathered = [torch.empty(_NUMBERS) for _ in range(world)]
    group.allgather([gathered], [pattern(rank)]).wait(limit)
    return all(torch.equal(values, pattern(other)) for other, values in enumerate(gathered))


def pattern(rank: int) -> Any:
    """What `rank` sends: float32 numbers that no other rank's part contains in that order."""
    import torch

    return torch.arange(_NUMBERS, dtype=torch.float32).mul_(rank + 1).remainder_(8191.0)
