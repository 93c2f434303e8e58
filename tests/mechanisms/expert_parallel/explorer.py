"""Every interleaving of a small layer: ranks run `flashmoe.protocol.Pass` over links that keep no order but that of a
tag (less than the transport promises), and each step of each rank is tried in each order (states that were seen are not
looked at again)."""

from __future__ import annotations

import random
from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import NamedTuple

from espalier.mechanisms.expert_parallel.flashmoe.protocol import TilePass, TileTask

HEADER, REFS, WEIGHTS, ROWS = "header", "references", "weights", "rows"


class Cell(NamedTuple):
    """What a source sends a rank: of each tile whether it brings rows of its own, and whether there are references."""

    fresh: tuple[bool, ...] = ()
    references: bool = False


class Wrong(Exception):
    """What the explorer found."""


@dataclass
class Rules:
    """How ranks behave; mutants change one of them."""

    kind: type[TilePass] = TilePass
    says_nothing: bool = True
    """A header goes to a rank for which there is no token, too."""
    keeps_order: bool = True
    """Two messages of one tag keep their order."""


@dataclass
class Rank:
    """One rank. Has state: its pass, what it waits for (as calls of `Transport.expect`), and what it has."""

    number: int = -1
    now: TilePass | None = None
    expected: dict[tuple[int, str], deque] = field(default_factory=dict)
    got: set = field(default_factory=set)
    ran: list = field(default_factory=list)


class World:
    """All ranks and what is under way. Has state.

    Args:
        cells: `cells[source][target]`; passes: so many, forward and backward in turn.
    """

    def __init__(self, cells, passes, rules):
        self.cells, self.passes, self.rules = cells, passes, rules
        self.ranks = [Rank() for _ in cells]
        self.links: dict[tuple[int, int, object], deque] = {}
        for me in range(len(cells)):
            self.begin(me)

    def copy(self):
        found = copy(self)
        found.links = {key: deque(one) for key, one in self.links.items()}
        found.ranks = []
        for rank in self.ranks:
            now = copied(rank.now)
            expected = {key: deque(one) for key, one in rank.expected.items()}
            found.ranks.append(Rank(rank.number, now, expected, set(rank.got), list(rank.ran)))
        return found

    @property
    def state(self):
        ranks = tuple(
            (
                rank.number,
                signature(rank.now),
                tuple(sorted((key, tuple(one)) for key, one in rank.expected.items() if one)),
                frozenset(rank.got),
                frozenset(rank.ran),
            )
            for rank in self.ranks
        )
        return ranks, tuple(sorted((key, tuple(one)) for key, one in self.links.items() if one))

    # --- what a rank does (`flashmoe.layer`) ---

    def send(self, me, peer, tag):
        self.links.setdefault((me, peer, tag), deque()).append(self.ranks[me].number)

    def expect(self, me, peer, tag, event):
        self.ranks[me].expected.setdefault((peer, tag), deque()).append(event)

    def begin(self, me):
        rank, others = self.ranks[me], [peer for peer in range(len(self.cells)) if peer != me]
        rank.number, rank.got, rank.ran = rank.number + 1, set(), []
        if rank.number == self.passes:
            rank.now = None
            return
        forward, own = rank.number % 2 == 0, self.cells[me]
        rank.now = self.rules.kind(me, {peer: len(own[peer].fresh) for peer in others}, len(own[me].fresh))
        for peer in others:
            cell, coming = own[peer], self.cells[peer][me]
            if forward:
                self.expect(me, peer, HEADER, ("heard", peer))
            self.announce(me, peer, cell, forward)
            for number, fresh in enumerate(cell.fresh):
                if fresh:
                    self.send(me, peer, f"{ROWS} {number}")
            for number in range(len(cell.fresh)):
                self.expect(me, peer, f"answer {number}", ("answered", TileTask(peer, number)))
            if not forward:
                if coming.fresh:
                    self.expect(me, peer, WEIGHTS, ("referred", peer))
                self.expect_rows(me, peer, coming)
                rank.now.heard(peer, list(coming.fresh), bool(coming.fresh))

    def announce(self, me, peer, cell, forward):
        if forward and (cell.fresh or self.rules.says_nothing):
            self.send(me, peer, HEADER)
        if forward and cell.references:
            self.send(me, peer, REFS)
        if not forward and cell.fresh:
            self.send(me, peer, WEIGHTS)

    def expect_rows(self, me, peer, cell):
        for number, fresh in enumerate(cell.fresh):
            if fresh:
                self.expect(me, peer, f"{ROWS} {number}", ("arrived", TileTask(peer, number)))

    # --- steps ---

    def steps(self):
        """What may happen next: a message is taken by its receiver, or a tile is run."""
        found = []
        for me, rank in enumerate(self.ranks):
            for (peer, tag), waiting in rank.expected.items():
                if waiting and (line := self.links.get((peer, me, tag))):
                    found += [(me, peer, tag, place) for place in range(1 if self.rules.keeps_order else len(line))]
            if rank.now is not None and (rank.now._ready or rank.now._own):
                found.append((me, None, None, 0))
        return found

    def take(self, step):
        me, peer, tag, place = step
        rank = self.ranks[me]
        if peer is None:
            self.run(me)
        else:
            kind, what = rank.expected[peer, tag].popleft()
            line = self.links[peer, me, tag]
            sent = line[place]
            del line[place]
            if sent != rank.number:
                raise Wrong(f"rank {me} takes the {tag} of pass {sent} for that of pass {rank.number}")
            rank.got.add((kind, what))
            if kind == "heard":
                cell = self.cells[peer][me]
                if cell.references:
                    self.expect(me, peer, REFS, ("referred", peer))
                self.expect_rows(me, peer, cell)
                rank.now.heard(what, list(cell.fresh), cell.references)
            else:
                getattr(rank.now, kind)(what)
        if rank.now is not None and rank.now.done:
            self.end(me)

    def run(self, me):
        rank = self.ranks[me]
        task = rank.now.take()
        if task in rank.ran:
            raise Wrong(f"rank {me} runs {task} twice")
        if task.source != me:
            cell = self.cells[task.source][me]
            needed = {
                ("arrived", TileTask(task.source, number))
                for number, fresh in enumerate(cell.fresh[: task.number + 1])
                if fresh and (number == task.number or cell.references)
            }
            if cell.references or rank.number % 2:
                needed.add(("referred", task.source))
            if missing := needed - rank.got:
                raise Wrong(f"rank {me} runs {task} before {sorted(missing)}")
            self.send(me, task.source, f"answer {task.number}")
        rank.ran.append(task)
        rank.now.ran()

    def end(self, me):
        rank = self.ranks[me]
        due = sum(len(row[me].fresh) for row in self.cells)
        if len(rank.ran) != due:
            raise Wrong(f"rank {me} ends pass {rank.number} with {len(rank.ran)} of {due} tiles run")
        if unread := [what for what, waiting in rank.expected.items() if waiting]:
            raise Wrong(f"rank {me} ends pass {rank.number} and has not taken {unread}")
        self.begin(me)
        if rank.now is not None and rank.now.done:  # nothing to do for anybody
            self.end(me)

    def check_end(self):
        if not all(rank.number == self.passes for rank in self.ranks):
            raise Wrong(f"no rank can go on; passes {[rank.number for rank in self.ranks]} of {self.passes}")
        if any(self.links.values()):
            raise Wrong("messages are left over")


def copied(now):
    if now is None:
        return None
    found = copy(now)
    for name, value in vars(now).items():
        if isinstance(value, dict):
            setattr(found, name, {key: deque(one) for key, one in value.items()})
        elif isinstance(value, set | deque):
            setattr(found, name, copy(value))
    return found


def signature(now):
    if now is None:
        return None
    return tuple(
        tuple(sorted((key, tuple(one)) for key, one in value.items()))
        if isinstance(value, dict)
        else frozenset(value)
        if isinstance(value, set)
        else tuple(value)
        if isinstance(value, deque)
        else value
        for _, value in sorted(vars(now).items())
    )


def explore(cells, passes=3, rules=None, limit=2_000_000):
    """The number of states. Raises Wrong for any interleaving in which something is lost, early, mixed or stuck."""
    first = World(cells, passes, rules or Rules())
    seen, front = {first.state}, [first]
    while front:
        world = front.pop()
        steps = world.steps()
        if not steps:
            world.check_end()
        for step in steps:
            following = world.copy()
            following.take(step)
            if (state := following.state) not in seen:
                seen.add(state)
                front.append(following)
        assert len(seen) < limit
    return len(seen)


def walk(cells, passes, seed, rules=None):
    """One interleaving at random, to its end."""
    world, chance = World(cells, passes, rules or Rules()), random.Random(seed)
    while steps := world.steps():
        world.take(chance.choice(steps))
    world.check_end()
