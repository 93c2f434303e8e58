"""Failure diagnosis from logs of any framework: the reason, the line that shows it, the rank at fault, what to do.

After Acme (Hu et al., NSDI 2024, arXiv 2403.07648), section on diagnosis: compress the logs, ask rules, then compare
with past incidents. A loss that leaves its course is a cause of its own (section on recovery): Acme's monitor alarms at
a loss 1.5 times the one before; here the level is the lowest median of 16 losses, a step must leave it by half and by 8
median deviations, and a loss that comes back by itself is none: one odd batch needs no rollback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from espalier.ops import root_cause
from espalier.ops.incidents import Incident, with_incident
from espalier.ops.log_scan import line_labels, scan
from espalier.ops.log_scan.line_labels import LogLine
from espalier.ops.log_scan.scan import Loss, Scanned
from espalier.ops.root_cause import STRENGTH, Cause, Finding
from espalier.ops.rules import LogRule, built_in_rules
from espalier.ops.taxonomy import LOSS_ANOMALY, NO_FAILURE, REASONS, UNKNOWN, Action, Diagnosis, EvidenceLine, called
from espalier.recipe.errors import UserError

LINES = 8000
"""Kept lines that the rules are asked about, the last ones: enough for a second of work, and a log keeps hundreds."""
SHOWN = 5
"""Lines of evidence beside the root line."""
WIDE = 300
"""Characters of a line of evidence."""
SUFFIXES = (".log", ".out", ".err", ".txt", ".stdout", ".stderr", ".log.gz", ".out.gz", ".err.gz")
DEEP = 4
"""Folders below the named one that are looked into: torchrun's logs stand at run/attempt_0/3/stderr.log."""
LOGS = 10_000
"""Logs of a folder that are read."""
LEAST, WINDOW = 10, 16
"""Losses below which nothing is said, and those a median is of."""
RATIO, DEVIATIONS = 1.5, 8.0
"""By how much a loss must leave the level, and by how many median deviations."""
LASTING = 3
"""Losses out of course in a row that are a departure."""
_RANK = re.compile(
    r"(?:rank|trainer|worker|task|proc(?:ess)?)[-_.]?(\d+)|(?:^|/)(\d+)/(?:stdout|stderr|std)|[-_.](\d+)\.(?:err|out|log)",
    re.I,
)
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
    """What a diagnosis may rest on: `rules` in the order they are asked (None: the product's own), past `incidents` for
    what no rule explains, and a language `model` (an address or a file) for what these do not explain either."""

    rules: tuple[LogRule, ...] | None = None
    incidents: tuple[Incident, ...] = ()
    model: str | None = None


@dataclass(frozen=True)
class Case:
    """One log, read: what was kept of it, its lines, and the cause and the odd loss found in them."""

    scanned: Scanned
    parsed: list[LogLine]
    cause: Cause | None
    anomaly: Loss | None


def diagnose(paths: str | Path | Sequence[str | Path], means: Means = Means()) -> list[Diagnosis]:
    """Why jobs ended as they did.

    Args:
        paths: one log or several, each of a job of its own, or folders. The logs in a run's folder, or whose names tell
            ranks (rank3.log, attempt_0/3/stderr.log), are one case; those in another folder one each.
        means: rules and past incidents, if not the product's rules alone.

    Returns:
        One diagnosis for each case, in order. Raises UserError for a log that cannot be read.
    """
    every = [paths] if isinstance(paths, str | Path) else paths
    diagnoses = []
    for path in map(Path, every):
        if not path.is_dir():
            diagnoses.append(of_case(read(path, means), means))
            continue
        logs = logs_of(path)
        if one_run(path, logs):
            diagnoses.append(of_run(path, logs, means))
        else:
            diagnoses += [of_case(read(log, means), means) for log in logs]
    return diagnoses


def read(path: str | Path, means: Means) -> Case:
    """The log at `path` with what the rules find in it. Raises UserError."""
    return _case(scan.scan(path), means)


def of_text(text: bytes) -> Case:
    """What the rules find in a text that is no file, such as the end of a log."""
    return _case(scan.scan_text(text), Means())


def _case(scanned: Scanned, means: Means) -> Case:
    parsed = line_labels.parse(dict(list(scanned.lines.items())[-LINES:]))
    findings = root_cause.findings(parsed, built_in_rules() if means.rules is None else means.rules)
    speakers = len(
        {line.rank for line in line_labels.parse({loss.number: loss.text for loss in scanned.losses[-200:]})}
    )
    cause = root_cause.choose(findings, scanned.losses, speakers)
    return Case(scanned, parsed, cause, _anomaly(scanned, findings, cause))


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
    at = first_of([case.cause for _, case in cases])
    odd = next((number for number, (_, case) in enumerate(cases) if case.anomaly is not None), None)
    weak = at is None or STRENGTH[cases[at][1].cause.named.rule.role] >= 2  # type: ignore[union-attr]
    chosen = odd if odd is not None and weak else at if at is not None else 0
    log, case = cases[chosen]
    diagnosis = of_case(case, means)
    rank = rank_of(log, path)
    return (
        replace(diagnosis, first_failing_rank=rank)
        if rank is not None and diagnosis.reason not in (NO_FAILURE, LOSS_ANOMALY)
        else diagnosis
    )


def of_case(case: Case, means: Means) -> Diagnosis:
    """The diagnosis of one log: by its losses, its rules, and where these are silent by past incidents or a model."""
    if case.anomaly is not None:
        return _of_loss(case.scanned, case.anomaly)
    if case.cause is None:
        return _healthy(case.scanned, case.parsed)
    diagnosis = _of_cause(case.scanned.file, case.cause, case.parsed)
    if diagnosis.reason == UNKNOWN:
        diagnosis = with_incident(diagnosis, case.scanned.lines, means.incidents)
    if diagnosis.reason == UNKNOWN and means.model is not None:
        from espalier.ops import model_diagnosis

        return model_diagnosis.with_model(diagnosis, case.scanned.lines, means.incidents, means.model)
    return diagnosis


# --- folders ---------------------------------------------------------------------------------------------------------


def logs_of(folder: Path) -> list[Path]:
    """The logs in a run's folder, in the order of their names; its event log among them.

    Raises UserError where there is none.
    """
    logs = sorted(
        path
        for path in folder.rglob("*")
        if (path.name.endswith(SUFFIXES) or path.name == "events.jsonl")
        and len(path.relative_to(folder).parts) <= DEEP
        and path.is_file()
    )[:LOGS]
    if not logs:
        raise UserError(
            f"There is no log in the folder {folder}.",
            why=f"looked for files that end in {', '.join(SUFFIXES[:4])}, and for events.jsonl",
            do="name the logs themselves, whatever they are called",
        )
    return logs


def rank_of(path: Path, folder: Path) -> int | None:
    """The rank that a file's name tells: rank3.log, trainer-3.log, attempt_0/3/stderr.log."""
    match = _RANK.search(str(path.relative_to(folder)))
    return int(next(group for group in match.groups() if group)) if match else None


def one_run(folder: Path, logs: Sequence[Path]) -> bool:
    """Whether the logs are those of one run: a run's folder, or file names that tell ranks."""
    if (folder / "events.jsonl").exists() or (folder / "run.toml").exists() or len(logs) == 1:
        return True
    return sum(rank_of(path, folder) is not None for path in logs) * 2 > len(logs)


def first_of(causes: Sequence[Cause | None]) -> int | None:
    """The number of the log whose cause came first: the strongest, of equals the earliest by clock, else as given."""
    there = [(at, cause) for at, cause in enumerate(causes) if cause is not None]
    if not there:
        return None
    timed = all(cause.root.line.time is not None for _, cause in there)

    def order(entry: tuple[int, Cause]) -> tuple[float, ...]:
        at, cause = entry
        clock = cause.root.line.time if timed else None
        return (STRENGTH[cause.named.rule.role], math.inf if clock is None else clock, at)

    return min(there, key=order)[0]


# --- losses ----------------------------------------------------------------------------------------------------------


def _anomaly(scanned: Scanned, findings: Sequence[Finding], cause: Cause | None) -> Loss | None:
    """The first odd loss, where the losses went astray before anything else that could be a cause."""
    strong = cause is not None and STRENGTH[cause.named.rule.role] < 2
    odd = scanned.not_finite
    if odd is None and not any(finding.rule.role == "healthy" for finding in findings):
        odd = departure(scanned.losses)
    if odd is None:
        return None
    if cause is not None and cause.named.rule.reason == LOSS_ANOMALY:
        return odd if odd.number <= cause.root.line.number else None
    return None if strong and cause is not None and cause.root.line.number < odd.number + 200 else odd


def departure(losses: Sequence[Loss]) -> Loss | None:
    """The first loss of a departure that lasts to the end of the log, None where the losses stay on course.

    Losses that are not numbers are told by the scan (`Scanned.not_finite`), and left out here; so are series that
    touch zero, whose ratios say nothing.
    """
    known = [loss for loss in losses if np.isfinite(loss.value)]
    values = np.array([loss.value for loss in known])
    if len(values) < LEAST or values.min() <= 0:
        return None
    window = min(WINDOW, len(values) // 2)
    edges = np.arange(0, len(values) - window + 1, max(1, window // 2))
    medians = np.array([np.median(values[at : at + window]) for at in edges])
    low = int(medians.argmin())
    course = values[edges[low] : edges[low] + window]
    level = float(medians[low])
    spread = float(np.median(np.abs(course - level)))
    limit = max(RATIO * level, level + DEVIATIONS * spread)
    if float(np.median(values[-LASTING:])) <= limit or int(edges[low]) + LASTING >= len(values):
        return None
    out = values > limit
    last_good = next((at for at in range(len(out) - 1, 0, -1) if not out[at] and not out[at - 1]), -1)
    first = last_good + 1
    if len(values) - first < LASTING or first <= int(edges[low]):
        return None
    while first < len(values) and not out[first]:
        first += 1
    return known[first]


def _of_loss(scanned: Scanned, odd: Loss) -> Diagnosis:
    before = [loss for loss in scanned.losses if loss.number < odd.number][-2:]
    after = [loss for loss in scanned.losses if loss.number > odd.number][:2]
    evidence = [_evidence(odd, "the loss leaves its course")]
    evidence += [_evidence(loss, "before") for loss in before]
    evidence += [_evidence(loss, "after: it does not come back") for loss in after]
    return called(scanned.file, LOSS_ANOMALY, root_line=odd.number, evidence=tuple(evidence), source="losses")


# --- nothing ---------------------------------------------------------------------------------------------------------


def _healthy(scanned: Scanned, parsed: Sequence[LogLine]) -> Diagnosis:
    last = next((line for line in reversed(parsed) if line.text.strip()), None)
    if last is None:
        advice = "the log is empty: look at the launcher's or the scheduler's own"
        return called(scanned.file, UNKNOWN, advice=advice, source="nothing")
    evidence = _evidence(last, "the last line; none before it tells of a failure")
    return called(scanned.file, NO_FAILURE, evidence=(evidence,))


# --- causes ----------------------------------------------------------------------------------------------------------


def _of_cause(file: str, cause: Cause, parsed: Sequence[LogLine]) -> Diagnosis:
    named = cause.named
    root = cause.root
    reason = named.rule.reason or UNKNOWN
    action, advice = _action(cause)
    rank = _rank(cause, parsed)
    node = _node(cause, parsed, rank) if REASONS[reason].action == "isolate" else None
    shown = [_evidence(root.line, f"the cause ({root.rule.id})")]
    if named is not root:
        shown.append(_evidence(named.line, f"names it ({named.rule.id})"))
    seen = {line.line for line in shown}
    rules_shown = {root.rule.id, named.rule.id}
    for other in cause.others:
        if other.line.number not in seen and other.rule.id not in rules_shown and len(shown) <= SHOWN:
            says = "follows" if other.line.number > root.line.number else "stands before"
            shown.append(_evidence(other.line, f"{says} ({other.rule.id})"))
            rules_shown.add(other.rule.id)
    return called(
        file, reason, root_line=root.line.number, first_failing_rank=rank, suspect_node=node, action=action,
        evidence=tuple(shown), advice=advice,
        source="rules" if reason != UNKNOWN else "nothing",
    )  # fmt: skip


def _action(cause: Cause) -> tuple[Action, str]:
    """What to do, and the advice. No node is isolated unless a line is about hardware: the same error on sound nodes
    would take out one after the other."""
    rule = cause.named.rule
    usual = REASONS[rule.reason or UNKNOWN]
    action = rule.action or usual.action
    advice = rule.advice or usual.advice
    shown = any(finding.about_hardware for finding in (cause.root, cause.named, *cause.others))
    if action != "isolate" or shown:
        return action, advice
    return "retry", f"no line is about hardware; if it fails on the same node again: {advice}"


def _rank(cause: Cause, parsed: Sequence[LogLine]) -> int | None:
    """The rank whose fault it was: of the root line, else what the launcher observed first."""
    if cause.named.rule.id == "collective-timeout":
        late = _late(cause)
        if late is not None:
            return late
    root = cause.root
    if cause.named.rule.reason == NO_FAILURE:
        return None
    alike = [
        other.rank
        for other in cause.others
        if other.rule.reason == cause.named.rule.reason
        and (root.node is None or other.node is None or other.node == root.node)
    ]
    for rank in (cause.root.rank, cause.named.rank, *alike):
        if rank is not None:
            return rank
    for pattern, group in ((_FIRST_OBSERVED, 1), (_SPAWNED, 1), (_TASK, 2), (_LOCAL_RANK, 1)):
        for line in parsed:
            if line.number >= cause.root.line.number - 60 and (
                match := pattern.search(line.text) or pattern.search(line.raw)
            ):
                return int(match[group])
    known = {line.rank for line in parsed if line.rank is not None}
    alone = len(known) < 2 and root.node is None and len({line.node for line in parsed if line.node}) < 2
    return next(iter(known or {0})) if alone and root.rule.role not in ("hardware", "exit") else None


def _late(cause: Cause) -> int | None:
    """Of ranks whose collective timed out, the one that had entered the fewest: the others waited for it."""
    entered: dict[int, int] = {}
    for finding in (cause.root, *cause.others):
        match = _ENQUEUED.search(finding.line.text) or _SEQUENCE.search(finding.line.text)
        if finding.rank is not None and match and finding.rule.role == "cascade":
            entered[finding.rank] = min(entered.get(finding.rank, int(match[1])), int(match[1]))
    if len(entered) < 2:
        return None
    least = min(entered.values())
    late = [rank for rank, count in entered.items() if count == least]
    return late[0] if len(late) == 1 else None


def _node(cause: Cause, parsed: Sequence[LogLine], rank: int | None) -> str | None:
    """The host to test first: of the root's line, else where the launcher says that the rank ran."""
    alike = [other.node for other in cause.others if other.rule.reason == cause.named.rule.reason]
    for node in (cause.root.node, cause.named.node, *alike):
        if node:
            return node
    host = None
    for line in parsed:
        if match := _REMOTE_DAEMON.search(line.text):
            return match[1]
        if match := _HOST.match(line.text):
            host = match[1]
        elif host and rank is not None and (match := _FIRST_OBSERVED.match(line.text)) and int(match[1]) == rank:
            return host
        elif rank is not None and (match := _TASK.search(line.raw)) and int(match[2]) == rank:
            return match[1]
    return next((line.node for line in parsed if line.node and rank is not None and line.rank == rank), None)


def _evidence(line: LogLine | Loss, note: str) -> EvidenceLine:
    text = (line.raw if isinstance(line, LogLine) else line.text).strip()
    return EvidenceLine(line.number, text if len(text) <= WIDE else text[: WIDE - 1] + "…", note)
