"""Past incidents: a log that no rule explains gets the reason of the incident that reads alike, and is never stopped.

After arXiv 2403.07648, section on diagnosis, which retrieves similar incidents from a vector store. Here TF-IDF over
words and pairs of words; incidents are tables `[[incident]]` in the user's file of rules: what the log said, and what
it turned out to be. Only a rule is ground enough to say that an unchanged job cannot succeed.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from espalier.ops.rules import one_of
from espalier.ops.taxonomy import REASONS, Diagnosis, EvidenceLine
from espalier.recipe.errors import UserError

ALIKE = 0.5
"""Share of an incident that a log must hold to be said to be alike: half of its words, and those in their order."""
CLEAR = 1.2
"""How much more alike than the best incident of another reason it must be."""
READ = 60
"""Last lines of a log that are compared with incidents."""

_WORD = re.compile(r"[a-z_]{3,}")


@dataclass(frozen=True)
class Incident:
    """One that is known: the log lines of the incident, the reason it had, and what was done."""

    text: str
    reason: str
    advice: str = ""


def read(path: str | Path) -> tuple[Incident, ...]:
    """The `[[incident]]` tables of a file of rules, none if it has none. Raises UserError naming the table at fault."""
    entries = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("incident", [])
    return tuple(_made(entry, f"{path}: incident {at}") for at, entry in enumerate(entries, 1))


def _made(entry: object, place: str) -> Incident:
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise UserError(f"{place} has no text.", do="text = '''the log lines of the incident'''")
    return Incident(entry["text"], one_of(entry, "reason", tuple(REASONS), place), str(entry.get("advice", "")))


def with_incident(diagnosis: Diagnosis, lines: Mapping[int, str], known: Sequence[Incident]) -> Diagnosis:
    """`diagnosis`, which knows no reason, with that of the `known` incident that the last of `lines` read like."""
    incident = explained("\n".join(list(lines.values())[-READ:]), known)
    if incident is None:
        return diagnosis
    kind = REASONS[incident.reason]
    note = EvidenceLine(
        diagnosis.root_line or 0, incident.text.strip().splitlines()[0], "a past incident that reads alike"
    )
    return replace(
        diagnosis, category=kind.category, reason=incident.reason, advice=incident.advice or kind.advice,
        source="incidents", action="retry" if kind.action in ("stop", "isolate") else kind.action,
        evidence=(*diagnosis.evidence, note),
    )  # fmt: skip


def explained(text: str, known: Sequence[Incident]) -> Incident | None:
    """The incident that explains the lines in `text`: alike enough, and clearly more than any of another reason."""
    scored = nearest_incidents(text, known)
    if not scored or scored[0][0] < ALIKE:
        return None
    best, incident = scored[0]
    others = [score for score, other in scored if other.reason != incident.reason]
    return incident if not others or best >= CLEAR * others[0] else None


def nearest_incidents(text: str, known: Sequence[Incident]) -> list[tuple[float, Incident]]:
    """The incidents, the most alike to the lines in `text` first, each with the share of its TF-IDF weight that the
    lines hold: 0 to 1, and not less for all the other lines of a log."""
    terms = [_terms(incident.text) for incident in known]
    there = Counter(term for words in terms for term in words)
    weight = {term: math.log((1 + len(known)) / (1 + number)) + 1 for term, number in there.items()}
    asked = _terms(text)
    scored = [(_held(entry, asked, weight), incident) for entry, incident in zip(terms, known, strict=True)]
    return sorted(scored, key=lambda pair: -pair[0])


def _terms(text: str) -> Counter[str]:
    terms: Counter[str] = Counter()
    for line in text.lower().splitlines():
        words = _WORD.findall(line)
        terms.update(words)
        terms.update(f"{word} {other}" for word, other in pairwise(words))
    return terms


def _held(incident: Counter[str], log: Counter[str], weight: dict[str, float]) -> float:
    each = {term: (1 + math.log(count)) * weight[term] for term, count in incident.items()}
    whole = sum(each.values())
    return sum(value for term, value in each.items() if term in log) / whole if whole else 0.0
