"""Failure taxonomy: why training jobs fail, by a six-month study, what each reason calls for, and `Diagnosis`.

After Hu et al., "Characterization of Large Language Model Development in the Datacenter" (Acme), NSDI 2024, arXiv
2403.07648: 29 reasons in three categories. Ours are `Version Mismatch`, `Hang`, `Loss Anomaly`, `No Failure`,
`Unknown`, and the actions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from espalier.recipe.data_table import data_table

Action = Literal["retry", "isolate", "rollback", "stop", "none"]
"""retry: bounded restart; isolate: test the nodes, leave out those that fail, restart; rollback: an earlier checkpoint,
and skip the data that followed it; stop: a person must change something first; none: nothing has failed."""

ACTIONS: tuple[Action, ...] = get_args(Action)

INFRASTRUCTURE, SCRIPT = "Infrastructure", "Script"
UNKNOWN, NO_FAILURE, LOSS_ANOMALY, HANG = "Unknown", "No Failure", "Loss Anomaly", "Hang"


class ReasonInfo(NamedTuple):
    """What is known of a reason: its category, what to do about it unless a rule says otherwise, in one word and in
    a sentence."""

    category: str
    action: Action
    advice: str


REASONS = {name: ReasonInfo(**row) for name, row in data_table(__file__).items()}


class EvidenceLine(NamedTuple):
    """One line that speaks for a diagnosis: its number (from 1), its text, and what it shows."""

    line: int
    text: str
    shows: str


@dataclass(frozen=True)
class Diagnosis:
    """Why one log, or the logs of one run, ended as they did.

    Attributes:
        file: the log that holds the root line.
        category, reason: names of the taxonomy.
        root_line: number, from 1, of the line that first shows the cause.
        first_failing_rank, suspect_node: whose fault came first, and the host to test, where the log tells.
        action: what to do, see `Action`.
        evidence: the lines it rests on, the root line first.
        advice: what a person can do.
        source: what found it: `rules`, `losses`, `incidents`, `model` or `nothing`.
    """

    file: str
    category: str
    reason: str
    root_line: int | None
    first_failing_rank: int | None
    suspect_node: str | None
    action: Action
    evidence: tuple[EvidenceLine, ...] = ()
    advice: str = ""
    source: str = "rules"


def called(file: str, reason: str, **more: Any) -> Diagnosis:
    """The diagnosis of the log `file` by its reason; category, action and advice are the reason's unless in `more`."""
    kind = REASONS[reason]
    plain = Diagnosis(file, kind.category, reason, None, None, None, kind.action, (), kind.advice)
    return replace(plain, **more)


def restart_helps(diagnosis: Diagnosis) -> bool:
    """Whether starting again, on good nodes and from the right checkpoint, can succeed without a person."""
    return diagnosis.action in ("retry", "isolate", "rollback")


def as_dict(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values, as `espalier diagnose --json` prints them."""
    return {**asdict(diagnosis), "evidence": [line._asdict() for line in diagnosis.evidence]}
