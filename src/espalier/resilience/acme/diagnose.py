"""Why did it fail? From logs of any framework to a reason, the line that shows it, whose fault it was, what to do.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648), section on diagnosis: compress the logs, ask rules, look at past
incidents, ask a language model last. All but the model works alone, and the model cannot make a restart a stop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from espalier.errors import UserError
from espalier.resilience.acme import causes, folder, lines, losses, scan
from espalier.resilience.acme.causes import Cause, Finding
from espalier.resilience.acme.incidents import Incident
from espalier.resilience.acme.lines import Line
from espalier.resilience.acme.model import Endpoint
from espalier.resilience.acme.rules import Rule, own
from espalier.resilience.acme.scan import Loss, Scanned
from espalier.resilience.acme.taxonomy import LOSS_ANOMALY, NO_FAILURE, REASONS, UNKNOWN, Diagnosis, Evidence
from espalier.resilience.acme.unexplained import beyond_rules

LINES = 8000
"""Kept lines that the rules are asked about, the last ones: enough for a second of work, and a log keeps hundreds."""
SHOWN = 5
"""Lines of evidence beside the root line."""
WIDE = 300
"""Characters of a line of evidence."""
_FIRST_OBSERVED = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)")
_LOCAL_RANK = re.compile(r"local_rank: (\d+)")
_SPAWNED = re.compile(r"^-- Process (\d+) terminated with")
_HOST = re.compile(r"^\s*host\s*: ([\w.-]+)")
_TASK = re.compile(r"error: ([\w.-]+): tasks? (\d+)[\d,-]*: (?!Killed|Terminated)")
_REMOTE_DAEMON = re.compile(r"Remote daemon: .* on node ([\w.-]+)")
_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (\d+)", re.I)
_SEQUENCE = re.compile(r"SeqNum=(\d+)")


@dataclass(frozen=True)
class Means:
    """What a diagnosis may rest on.

    Attributes:
        rules: in the order they are asked; None: the product's own.
        incidents: past ones, for what no rule explains.
        model: where to ask for what those do not explain either; None: nowhere.
    """

    rules: tuple[Rule, ...] | None = None
    incidents: tuple[Incident, ...] = ()
    model: Endpoint | None = None


@dataclass(frozen=True)
class Case:
    """One log, read: what was kept of it, its lines, and the cause and the odd loss found in them."""

    scanned: Scanned
    parsed: list[Line]
    cause: Cause | None
    anomaly: Loss | None


def diagnose(paths: str | Path | Sequence[str | Path], means: Means = Means()) -> list[Diagnosis]:
    """Why jobs ended as they did.

    Args:
        paths: one log or several, each of a job of its own, or folders. The logs in a run's folder, or whose names tell
            ranks (rank3.log, attempt_0/3/stderr.log), are one case; those in another folder one each.
        means: rules, past incidents and a model, if not the product's rules alone.

    Returns:
        One diagnosis for each case, in order. Raises UserError for a log that cannot be read.
    """
    every = [paths] if isinstance(paths, str | Path) else paths
    found: list[Diagnosis] = []
    for path in map(Path, every):
        if not path.is_dir():
            found.append(of_case(read(path, means), means))
            continue
        logs = folder.logs_of(path)
        if folder.one_run(path, logs):
            found.append(of_run(path, logs, means))
        else:
            found += [of_case(read(log, means), means) for log in logs]
    return found


def read(path: str | Path, means: Means) -> Case:
    """The log at `path` with what the rules find in it. Raises UserError."""
    return _case(scan.scan(path), means)


def of_text(text: bytes, means: Means = Means()) -> Case:
    """What the rules find in a text that is no file, such as the end of a log."""
    return _case(scan.scan_text(text), means)


def _case(scanned: Scanned, means: Means) -> Case:
    parsed = lines.parse(dict(list(scanned.lines.items())[-LINES:]))
    found = causes.findings(parsed, own() if means.rules is None else means.rules)
    speakers = len({line.rank for line in lines.parse({loss.number: loss.text for loss in scanned.losses[-200:]})})
    cause = causes.choose(found, scanned.losses, speakers)
    return Case(scanned, parsed, cause, _anomaly(scanned, found, cause))


def of_run(path: Path, logs: Sequence[Path], means: Means) -> Diagnosis:
    """The one diagnosis of the logs of a run: of the log that shows the cause, or the first where none does."""
    cases = []
    for log in logs:
        try:
            cases.append((log, read(log, means)))
        except UserError:
            if len(logs) == 1:
                raise
    if not cases:
        raise UserError(f"No log in the folder {path} is text.", do="name the log itself")
    at = folder.first_of([case.cause for _, case in cases])
    odd = next((number for number, (_, case) in enumerate(cases) if case.anomaly is not None), None)
    weak = at is None or causes.STRENGTH[cases[at][1].cause.named.rule.role] >= 2  # type: ignore[union-attr]
    chosen = odd if odd is not None and weak else at if at is not None else 0
    log, case = cases[chosen]
    told = of_case(case, means)
    rank = folder.rank_of(log, path)
    return (
        replace(told, first_failing_rank=rank)
        if rank is not None and told.reason not in (NO_FAILURE, LOSS_ANOMALY)
        else told
    )


def of_case(case: Case, means: Means) -> Diagnosis:
    """The diagnosis of one log: by its losses, its rules, and where these are silent by incidents or the model."""
    if case.anomaly is not None:
        return _of_loss(case.scanned, case.anomaly)
    if case.cause is None:
        return _healthy(case.scanned, case.parsed)
    told = _of_cause(case.scanned.file, case.cause, case.parsed)
    return beyond_rules(told, case.scanned.lines, means) if told.reason == UNKNOWN else told


# --- losses ----------------------------------------------------------------------------------------------------------


def _anomaly(scanned: Scanned, found: Sequence[Finding], cause: Cause | None) -> Loss | None:
    """The first odd loss, where the losses went astray before anything else that could be a cause."""
    strong = cause is not None and causes.STRENGTH[cause.named.rule.role] < 2
    odd = scanned.not_finite
    if odd is None and not any(one.rule.role == "healthy" for one in found):
        odd = losses.departure(scanned.losses)
    if odd is None:
        return None
    if cause is not None and cause.named.rule.reason == LOSS_ANOMALY:
        return odd if odd.number <= cause.root.line.number else None
    return None if strong and cause is not None and cause.root.line.number < odd.number + 200 else odd


def _of_loss(scanned: Scanned, odd: Loss) -> Diagnosis:
    kind = REASONS[LOSS_ANOMALY]
    before = [loss for loss in scanned.losses if loss.number < odd.number][-2:]
    after = [loss for loss in scanned.losses if loss.number > odd.number][:2]
    evidence = [Evidence(odd.number, _cut(odd.text), "the loss leaves its course")]
    evidence += [Evidence(loss.number, _cut(loss.text), "before") for loss in before]
    evidence += [Evidence(loss.number, _cut(loss.text), "after: it does not come back") for loss in after]
    return Diagnosis(
        file=scanned.file,
        category=kind.category,
        reason=LOSS_ANOMALY,
        root_line=odd.number,
        first_failing_rank=None,
        suspect_node=None,
        action=kind.action,
        evidence=tuple(evidence),
        advice=kind.advice,
        source="losses",
    )


# --- nothing ---------------------------------------------------------------------------------------------------------


def _healthy(scanned: Scanned, parsed: Sequence[Line]) -> Diagnosis:
    last = next((line for line in reversed(parsed) if line.text.strip()), None)
    if last is None:
        kind, advice = REASONS[UNKNOWN], "the log is empty: look at the launcher's or the scheduler's own"
        return Diagnosis(scanned.file, kind.category, UNKNOWN, None, None, None, kind.action, (), advice, "nothing")
    kind = REASONS[NO_FAILURE]
    evidence = Evidence(last.number, _cut(last.raw), "the last line; none before it tells of a failure")
    return Diagnosis(scanned.file, kind.category, NO_FAILURE, None, None, None, kind.action, (evidence,), kind.advice)


# --- causes ----------------------------------------------------------------------------------------------------------


def _of_cause(file: str, cause: Cause, parsed: Sequence[Line]) -> Diagnosis:
    named, root = cause.named, cause.root
    reason = named.rule.reason or UNKNOWN
    kind = REASONS[reason]
    action = named.rule.action or kind.action
    rank = _rank(cause, parsed)
    node = _node(cause, parsed, rank) if action == "isolate" else None
    shown = [Evidence(root.line.number, _cut(root.line.raw), f"the cause ({root.rule.id})")]
    if named is not root:
        shown.append(Evidence(named.line.number, _cut(named.line.raw), f"names it ({named.rule.id})"))
    seen, told = {one.line for one in shown}, {root.rule.id, named.rule.id}
    for one in cause.others:
        if one.line.number not in seen and one.rule.id not in told and len(shown) <= SHOWN:
            says = "follows" if one.line.number > root.line.number else "stands before"
            shown.append(Evidence(one.line.number, _cut(one.line.raw), f"{says} ({one.rule.id})"))
            told.add(one.rule.id)
    advice = named.rule.advice or kind.advice
    source = "rules" if reason != UNKNOWN else "nothing"
    return Diagnosis(
        file, kind.category, reason, root.line.number, rank, node, action, tuple(shown), advice, source
    )  # fmt: skip


def _rank(cause: Cause, parsed: Sequence[Line]) -> int | None:
    """The rank whose fault it was: of the root line, else what the launcher observed first."""
    if cause.named.rule.id == "collective-timeout":
        late = _late(cause)
        if late is not None:
            return late
    root = cause.root
    if cause.named.rule.reason == NO_FAILURE:
        return None
    alike = [
        one.rank
        for one in cause.others
        if one.rule.reason == cause.named.rule.reason
        and (root.node is None or one.node is None or one.node == root.node)
    ]
    for rank in (cause.root.rank, cause.named.rank, *alike):
        if rank is not None:
            return rank
    for pattern, group in ((_FIRST_OBSERVED, 1), (_SPAWNED, 1), (_TASK, 2), (_LOCAL_RANK, 1)):
        for line in parsed:
            if line.number >= cause.root.line.number - 60 and (
                found := pattern.search(line.text) or pattern.search(line.raw)
            ):
                return int(found[group])
    known = {line.rank for line in parsed if line.rank is not None}
    alone = len(known) < 2 and root.node is None and len({line.node for line in parsed if line.node}) < 2
    return next(iter(known or {0})) if alone and root.rule.role not in ("hardware", "exit") else None


def _late(cause: Cause) -> int | None:
    """Of ranks whose collective timed out, the one that had entered the fewest: the others waited for it."""
    entered: dict[int, int] = {}
    for one in (cause.root, *cause.others):
        found = _ENQUEUED.search(one.line.text) or _SEQUENCE.search(one.line.text)
        if one.rank is not None and found and one.rule.role == "cascade":
            entered[one.rank] = min(entered.get(one.rank, int(found[1])), int(found[1]))
    if len(entered) < 2:
        return None
    least = min(entered.values())
    late = [rank for rank, count in entered.items() if count == least]
    return late[0] if len(late) == 1 else None


def _node(cause: Cause, parsed: Sequence[Line], rank: int | None) -> str | None:
    """The host to test first: of the root's line, else where the launcher says that the rank ran."""
    alike = [one.node for one in cause.others if one.rule.reason == cause.named.rule.reason]
    for node in (cause.root.node, cause.named.node, *alike):
        if node:
            return node
    host = None
    for line in parsed:
        if found := _REMOTE_DAEMON.search(line.text):
            return found[1]
        if found := _HOST.match(line.text):
            host = found[1]
        elif host and rank is not None and (found := _FIRST_OBSERVED.match(line.text)) and int(found[1]) == rank:
            return host
        elif rank is not None and (found := _TASK.search(line.raw)) and int(found[2]) == rank:
            return found[1]
    return next((line.node for line in parsed if line.node and rank is not None and line.rank == rank), None)


def _cut(text: str) -> str:
    text = text.strip()
    return text if len(text) <= WIDE else text[: WIDE - 1] + "…"
