"""Root cause of a failure: of all that went wrong in a log, what came first and not what followed from it.

After arXiv 2403.07648: one crash prints several errors, and the first cause must be chosen. Here: what the machine says
of itself outweighs programs; a cause outweighs what other ranks saw of it; of a chain of exceptions the first one
counts, unless a later one says more; what the job went on after is no cause; else the earliest wins, by clock where
all tell it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from espalier.ops.log_scan.line_labels import LogLine, rank_within, without_code
from espalier.ops.log_scan.scan import Loss
from espalier.ops.rules import LogRule, Role, book
from espalier.ops.taxonomy import REASONS, SCRIPT

STRENGTH: dict[Role, int] = {"hardware": 0, "root": 1, "exception": 1, "cascade": 2, "echo": 3, "exit": 4}
"""Of roles, the strongest first; causes and exceptions compete by time."""
NumbersOfRanks = dict[int | None, int]
"""By rank; None: of lines that name none."""
WENT_ON = 5
"""Losses of one rank after a finding that show the job went on."""
QUIET = ("DEBUG", "INFO", "NOTICE", "WARN", "WARNING")
"""Levels of lines that are a cause only where nothing louder is one."""
LOUD = ("ERROR", "CRITICAL", "FATAL", "SEVERE")
"""Levels of lines that are alarming even where no rule knows them."""
_WARNING = re.compile(r"\b\w*Warning: ")
_HARDWARE = re.compile(
    r"\bS?Xid\b[^:(]*(?:\([^)]*\))?: ?(?!(?:13|43|45)\b)\d+|NET/IB\b.*\b(?:status|error)[ =]+\d|vendor err \d+"
)
"""Lines about machines that rules of other roles know. Programs cause an Xid 13, 43 or 45."""
_HEAD = re.compile(
    r"^\s*(?:\+ Exception Group )?(?:Original )?Traceback \(most recent call last\)|^Stack trace|^\s*Original Traceback"
)
_THREAD = re.compile(r"^\s*Exception in thread")
_LINK = re.compile(r"^\s*(?:During handling of the above exception|The above exception was the direct cause)")


@dataclass(frozen=True)
class Finding:
    """A line and the rule that it is evidence for.

    Attributes:
        line, rule: which.
        rank, node: whose fault the line says it is.
        chain: the chain of tracebacks that its exception ends; -1: none.
    """

    line: LogLine
    rule: LogRule
    rank: int | None
    node: str | None
    chain: int = -1

    @property
    def quiet(self) -> bool:
        """Whether the line itself does not call it an error."""
        warns = self.line.level in QUIET or _WARNING.search(self.line.text) is not None
        return warns and self.rule.role != "hardware"

    @property
    def about_hardware(self) -> bool:
        """Whether the line is about a machine that should be tested: a driver's, a kernel's or a scheduler's."""
        if self.rule.role == "hardware":
            return (self.rule.action or REASONS[self.rule.reason].action) == "isolate"
        return _HARDWARE.search(self.line.text) is not None


@dataclass(frozen=True)
class Cause:
    """The root, and what speaks for it.

    Attributes:
        root: the finding whose line first shows the cause.
        named: the finding that names the reason, which is the root's in most cases.
        others: further findings, the nearest first.
    """

    root: Finding
    named: Finding
    others: tuple[Finding, ...]


def findings(lines: Sequence[LogLine], rules: Iterable[LogRule]) -> list[Finding]:
    """What the rules find, one for each line at most; noise, and what it covers, left out."""
    asked = book(tuple(rules))
    alarm = next((rule for rule in asked.rules if rule.id == "alarm"), None)
    chains = _chains(lines)
    covered: NumbersOfRanks = {}
    results = []
    for line in without_code(lines):
        if line.number <= covered.get(line.rank, 0):
            continue
        matched = asked.first(line.text)
        if matched is None:
            if alarm is not None and line.level in LOUD:
                results.append(_finding(line, alarm, {}, -1))
        elif matched[0].role == "noise":
            covered[line.rank] = line.number + matched[0].span if matched[0].span else 0
        else:
            results.append(_finding(line, matched[0], matched[1].groupdict(), chains.get(line.number, -1)))
    return [finding for finding in results if not _continued(finding, results)]


def _continued(finding: Finding, every: Sequence[Finding]) -> bool:
    """Whether the message of an exception begins on the next lines, and is known by itself."""
    if finding.rule.role != "exception" or not finding.line.text.rstrip().endswith(":"):
        return False
    at = bisect_left(every, finding.line.number + 1, key=lambda other: other.line.number)
    return any(
        other.rule.role == "root" and other.rank == finding.rank and other.line.number <= finding.line.number + 3
        for other in every[at : at + 3]
    )


def _finding(line: LogLine, rule: LogRule, groups: Mapping[str, str | None], chain: int) -> Finding:
    rank = groups.get("rank")
    whose = int(rank) if rank is not None else line.rank
    if whose is None:
        whose = rank_within(line.text)
    return Finding(line, rule, whose, groups.get("node") or line.node, chain)


def _chains(lines: Sequence[LogLine]) -> dict[int, int]:
    """The number of the chain of tracebacks that each exception's line ends."""
    ends = {}
    inside: NumbersOfRanks = {}
    linked: NumbersOfRanks = {}
    threads: NumbersOfRanks = {}
    count = 0
    for line in lines:
        who = line.rank
        if _LINK.match(line.text):
            linked[who] = inside.get(who, linked.get(who, -1))
        elif _HEAD.match(line.text):
            if linked.get(who, -1) < 0:
                count += 1
                linked[who] = count
            inside[who] = -1 if threads.get(who, -9) >= line.number - 2 else linked[who]
        elif _THREAD.match(line.text):
            threads[who] = line.number
        elif (
            who in inside
            and line.text
            and not line.text[0].isspace()
            and not line.text.startswith(("|", "+", "^", "~"))
        ):
            chain = inside.pop(who)
            ends[line.number] = chain
            linked[who] = -1
            _ends_linked(lines, line, chain, linked)
    return ends


def _ends_linked(lines: Sequence[LogLine], end: LogLine, chain: int, linked: NumbersOfRanks) -> None:
    """Keeps the chain open where one of the next lines of the same rank links a further traceback to it."""
    seen = 0
    at = bisect_left(lines, end.number, key=lambda line: line.number)
    for line in lines[at + 1 : at + 40]:
        if line.rank != end.rank or not line.text.strip():
            continue
        if _LINK.match(line.text) or line.text.startswith("Original Traceback"):
            linked[end.rank] = chain
            return
        seen += 1
        if seen > 4:
            return


def choose(findings: Sequence[Finding], losses: Sequence[Loss], ranks: int = 1) -> Cause | None:
    """The cause among the findings, or None where the job did its work.

    Args:
        found: of `findings`, in the order of lines.
        losses: the training losses of the same log, which show whether the job went on.
        ranks: how many ranks write losses.
    """
    findings = _still_open(findings, losses, ranks)
    done = max((finding.line.number for finding in findings if finding.rule.role == "healthy"), default=0)
    if done:
        later = [finding for finding in findings if finding.line.number > done]
        before = [finding for finding in findings if finding.line.number < done and finding.rule.role == "hardware"]
        if not _ended_badly(later):
            return None
        findings = [*before, *later]
    faults = [finding for finding in findings if finding.rule.role != "healthy"]
    if not faults:
        return None
    loud = [fault for fault in faults if not fault.quiet] or faults
    strongest = min(STRENGTH[finding.rule.role] for finding in loud)
    best = [finding for finding in loud if STRENGTH[finding.rule.role] == strongest]
    named = _in_chain(_first(best), best)
    return _renamed(named, faults)


def _still_open(findings: Sequence[Finding], losses: Sequence[Loss], ranks: int) -> list[Finding]:
    """The findings after which the job did not go on."""
    enough = WENT_ON * max(1, ranks)
    known = [loss.number for loss in losses if math.isfinite(loss.value)]
    return [finding for finding in findings if len(known) < enough or finding.line.number > known[-enough]]


def _ended_badly(later: Sequence[Finding]) -> bool:
    """Whether a job that said it was done failed all the same: an exit code and a cause for it, or an exception such as
    those of a disk that filled up under the last checkpoint. Peers that went away and threads that died count not."""
    exits = any(
        finding.rule.role == "exit" and finding.rule.reason != "No Failure" and _failed(finding.line.text)
        for finding in later
    )
    faults = [finding for finding in later if STRENGTH.get(finding.rule.role, 9) < 2]
    uncaught = any(fault.chain >= 0 and REASONS[fault.rule.reason].category == SCRIPT for fault in faults)
    return uncaught or (exits and bool(faults))


def _failed(text: str) -> bool:
    return re.search(r"exit ?code\s*:? ?-?[1-9]|ChildFailedError|Exited with exit code [1-9]", text, re.I) is not None


def _first(findings: Sequence[Finding]) -> Finding:
    """The earliest: by clock if all tell it, else as it stands."""
    if all(finding.line.time is not None for finding in findings):
        return min(findings, key=lambda finding: (finding.line.time or 0.0, finding.line.number))
    return min(findings, key=lambda finding: finding.line.number)


def _in_chain(first: Finding, best: Sequence[Finding]) -> Finding:
    """Of the chain of exceptions that `first` belongs to, the first that is known by more than its class."""
    if first.chain < 0 or first.rule.role != "exception":
        return first
    chain = [fault for fault in best if fault.chain == first.chain]
    return next((finding for finding in chain if finding.rule.role != "exception"), first)


def _renamed(named: Finding, faults: Sequence[Finding]) -> Cause:
    """The cause, its root moved to the first line that shows it."""
    before = [fault for fault in faults if fault is not named]
    refined = next((finding for finding in before if named.rule.id in finding.rule.after), None)
    root = named
    if refined is not None:
        root = min(named, refined, key=lambda finding: finding.line.number)
        named = refined
    earlier = [
        finding for finding in before if finding.rule.id in named.rule.after and finding.line.number < root.line.number
    ]
    earlier += [
        finding
        for finding in before
        if finding.rule.reason == named.rule.reason
        and finding.line.number < root.line.number
        and _one_fault(finding, root)
        and finding.quiet <= root.quiet
    ]
    if earlier:
        root = min(earlier, key=lambda finding: finding.line.number)
        root = replace(root, rank=root.rank if root.rank is not None else named.rank, node=root.node or named.node)
    others = sorted(
        (fault for fault in faults if fault is not root), key=lambda fault: abs(fault.line.number - root.line.number)
    )
    return Cause(root, named, tuple(others))


NEAR = 60
"""Lines within which findings of one reason and one rank are one fault."""


def _one_fault(first: Finding, other: Finding) -> bool:
    same = first.rank == other.rank or first.rank is None or other.rank is None
    return same and other.line.number - first.line.number <= NEAR
