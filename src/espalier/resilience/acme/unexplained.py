"""What no rule explains: past incidents first, then the model, neither of which can stop a job.

After arXiv 2403.07648, section on diagnosis; the bound on the action is ours: only evidence that a rule knows is ground
enough to say that an unchanged job cannot succeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from espalier.resilience.acme import incidents, model
from espalier.resilience.acme.taxonomy import REASONS, Action, Diagnosis, Evidence

if TYPE_CHECKING:
    from espalier.resilience.acme.diagnose import Means

READ = 60
"""Last lines that are compared with incidents."""


def beyond_rules(told: Diagnosis, lines: Mapping[int, str], means: Means) -> Diagnosis:
    """`told`, which knows no reason, with one from the user's incidents or the model if either has one."""
    text = "\n".join(list(lines.values())[-READ:])
    known = incidents.explained(text, means.incidents)
    if known is not None:
        kind = REASONS[known.reason]
        note = Evidence(told.root_line or 0, known.text.strip().splitlines()[0], "a past incident that reads alike")
        advice = known.advice or kind.advice
        action = never_stop(kind.action)
        return replace(
            told, category=kind.category, reason=known.reason, action=action, advice=advice, source="incidents",
            evidence=(*told.evidence, note),
        )  # fmt: skip
    return _asked(told, lines, means) if means.model is not None else told


def never_stop(action: Action) -> Action:
    """The action where the reason is likely and not certain: a bounded restart instead of a stop."""
    return "retry" if action == "stop" else action


def _asked(told: Diagnosis, lines: Mapping[int, str], means: Means) -> Diagnosis:
    assert means.model is not None
    similar = [one for _, one in incidents.nearest_incidents("\n".join(lines.values()), means.incidents)]
    try:
        proposal = model.ask(means.model, lines, similar)
    except model.Unanswered as error:
        return replace(told, advice=f"{told.advice} (the model was no help: {error})")
    kind = REASONS[proposal.reason]
    says = f"the model: {proposal.reason}, {proposal.votes} of {proposal.asked} answers"
    evidence = (Evidence(proposal.line, lines[proposal.line].strip()[:300], says), *told.evidence)
    return replace(
        told, category=kind.category, reason=proposal.reason, root_line=proposal.line, action=never_stop(kind.action),
        advice=kind.advice, source="model", evidence=evidence, proposal=proposal.rule(),
    )  # fmt: skip
