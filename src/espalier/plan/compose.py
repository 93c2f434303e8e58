"""Orders a plan's mechanisms, or refuses with the reason and the nearest allowed choice. Pure; knows no mechanism.

A mechanism declares a `Claim` beside its code: which question it answers, what it needs of the others, what it changes,
what it cannot stand. Nothing here or elsewhere asks for a pair of features by name.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass

from espalier.recipe.errors import UserError


@dataclass(frozen=True)
class Claim:
    """What one mechanism says of itself. Properties are short phrases, spelled the same wherever they occur.

    Attributes:
        name: the mechanism, unique in the product (`muon`, `every_step`).
        question: what it answers (`optimizer`, `sync`); a plan has one answer, unless all its answers are not `alone`.
        needs: properties that some mechanism applied earlier must bring.
        changes: the properties it brings: they hold once it is applied.
        forbids: properties that no other mechanism of the plan may bring. To bring and forbid the same one says
            "I, and nobody else".
        after: names or questions that are applied before it where they are present.
        instead: the choices nearest to it, best first, offered when it is refused.
        option: how a recipe asks for it, as on a command line; empty: it does not by itself.
        alone: False lets other answers to the same question stand beside it.
    """

    name: str
    question: str
    needs: Set[str] = frozenset()
    changes: Set[str] = frozenset()
    forbids: Set[str] = frozenset()
    after: Set[str] = frozenset()
    instead: tuple[str, ...] = ()
    option: str = ""
    alone: bool = True

    def __post_init__(self) -> None:
        for name in ("needs", "changes", "forbids", "after"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))


@dataclass(frozen=True)
class Composition:
    """The names of the mechanisms in the order in which they are applied."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Refusal:
    """Why the mechanisms cannot run together.

    `pair` names two present mechanisms (twice the same when one lacks something by itself); `instead` is what to do.
    """

    reason: str
    pair: tuple[str, str]
    instead: str


Table = Mapping[str, Claim]


def compose(claims: Iterable[Claim], known: Iterable[Claim] = ()) -> Composition | Refusal:
    """The order of `claims`, or why there is none.

    The answer depends on the set of claims only, never on their order. Ties go by name, so a further claim that
    concerns nobody leaves the others' order as it was. `known` are all mechanisms there are: from them a refusal
    names who would bring a missing property, and checks that the choice it offers would be accepted.
    """
    present = _by_name(claims)
    catalogue = {**_by_name(known), **present}
    outcome = _clash(present) or _unmet(present, catalogue) or _sorted(present)
    if isinstance(outcome, Composition):
        return outcome
    return Refusal(outcome.reason, outcome.pair, outcome.instead or _instead(outcome.pair, present, catalogue))


def require(claims: Iterable[Claim], known: Iterable[Claim] = ()) -> tuple[str, ...]:
    """The names of `claims` in order. Raises UserError with the reason and the nearest choice when refused."""
    outcome = compose(claims, known)
    if isinstance(outcome, Composition):
        return outcome.names
    left, right = outcome.pair
    what = f"{left} cannot run as planned." if left == right else f"{left} and {right} cannot run together."
    raise UserError(what, why=outcome.reason, do=outcome.instead)


def _by_name(claims: Iterable[Claim]) -> dict[str, Claim]:
    table: dict[str, Claim] = {}
    for claim in sorted(claims, key=lambda claim: claim.name):
        assert table.get(claim.name, claim) == claim, f"two mechanisms are called {claim.name}"
        table[claim.name] = claim
    return table


# --- what cannot be ----------------------------------------------------------------------------------------------


def _clash(present: Table) -> Refusal | None:
    """Of two that answer one question, or of which one forbids what the other brings."""
    answers: dict[str, Claim] = {}
    for claim in present.values():
        other = answers.setdefault(claim.question, claim)
        if other is not claim and (other.alone or claim.alone):
            reason = f"both answer the question {claim.question!r}, which takes one answer"
            return Refusal(reason, (other.name, claim.name), f"choose one: {other.name} or {claim.name}")
    for claim in present.values():
        for other in present.values():
            clash = sorted(claim.forbids & other.changes)
            if other is not claim and clash:
                reason = f"{claim.name} does not allow what {other.name} brings: {', '.join(clash)}"
                return Refusal(reason, (claim.name, other.name), "")
    return None


def _unmet(present: Table, catalogue: Table) -> Refusal | None:
    for claim in present.values():
        for need in sorted(claim.needs):
            if any(need in other.changes for other in present.values() if other is not claim):
                continue
            bringers = [other for other in catalogue.values() if need in other.changes and other is not claim]
            questions = {bringer.question for bringer in bringers}
            rivals = [other.name for other in present.values() if other is not claim and other.question in questions]
            names = " or ".join(bringer.name for bringer in bringers) or "no mechanism there is"
            reason = f"{claim.name} needs {need}, which {names} would bring"
            return Refusal(reason, (claim.name, rivals[0] if rivals else claim.name), "")
    return None


# --- the order ---------------------------------------------------------------------------------------------------


def _sorted(present: Table) -> Composition | Refusal:
    """Kahn's algorithm, the smallest ready name first; what is left over contains a cycle."""
    waits = {
        name: {
            other.name
            for other in present.values()
            if other is not claim
            and (other.name in claim.after or other.question in claim.after or claim.needs & other.changes)
        }
        for name, claim in present.items()
    }
    ready = [name for name, earlier in waits.items() if not earlier]
    heapq.heapify(ready)
    names: list[str] = []
    while ready:
        done = heapq.heappop(ready)
        names.append(done)
        for name, earlier in waits.items():
            if done in earlier:
                earlier.remove(done)
                if not earlier:
                    heapq.heappush(ready, name)
    if len(names) == len(present):
        return Composition(tuple(names))
    cycle = _cycle({name: earlier for name, earlier in waits.items() if earlier})
    reason = "each must be applied before the next: " + " -> ".join((*cycle, cycle[0]))
    return Refusal(reason, (cycle[0], cycle[1]), "")


def _cycle(waits: Mapping[str, set[str]]) -> tuple[str, ...]:
    """One cycle in the order of application, from its smallest name. Every name in `waits` waits for one in it."""
    path = [min(waits)]
    while True:
        name = min(waits[path[-1]])
        if name in path:
            cycle = path[path.index(name) :][::-1]
            start = cycle.index(min(cycle))
            return (*cycle[start:], *cycle[:start])
        path.append(name)


# --- what to do instead ------------------------------------------------------------------------------------------


def _instead(pair: tuple[str, str], present: Table, catalogue: Table) -> str:
    """The first exchange of one of the pair that would be accepted; what it declares itself comes first."""
    untried = ""
    for name in dict.fromkeys(pair):
        claim = present[name]
        same = [other.name for other in catalogue.values() if other.question == claim.question and other is not claim]
        for choice in dict.fromkeys((*claim.instead, *same)):
            option = catalogue[choice].option if choice in catalogue else ""
            offer = f"{option or f'{claim.question} = {choice}'} instead of {name}"
            if choice not in catalogue:
                untried = untried or offer
                continue
            rest = {key: other for key, other in present.items() if key != name}
            tried = {**rest, choice: catalogue[choice]}
            if not (_clash(tried) or _unmet(tried, catalogue)) and isinstance(_sorted(tried), Composition):
                return offer
    return untried or f"leave out {' or '.join(dict.fromkeys(pair))}"
