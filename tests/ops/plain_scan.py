"""The scan in plain form: what is kept of a log, line by line, with all of it in memory."""

from __future__ import annotations

import math
import re

from espalier.ops.log_scan import keywords, scan
from espalier.ops.log_scan.scan import Loss, Scanned, Template, Templates


def scan_plain(text: bytes) -> Scanned:
    """What `scan.scan_text` gives, of a text of any size."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    ends = [len(line) for line in lines]
    for at in range(1, len(ends)):
        ends[at] += ends[at - 1] + 1
    lines = [_both_ends(line) for line in lines]
    shapes = [keywords.shapes(line) for line in lines]
    kept, templates = _kept(lines, shapes)
    told = [scan.loss_in(number, *both) for number, both in enumerate(zip(lines, shapes, strict=True), 1)]
    losses = [loss for loss in told if loss is not None]
    late = tuple(loss for loss in losses if ends[loss.number - 1] >= len(text) - scan.LOSSES)
    texts = {number: scan.text_of(scan.cut(lines[number - 1])) for number in sorted(kept)}
    mattered = sum(map(keywords.matters, shapes))
    return Scanned("", texts, len(lines), len(text), mattered, late, _not_finite(losses), tuple(templates.entries))


def _both_ends(line: bytes) -> bytes:
    return line if len(line) <= scan.LONGEST else line[: scan.WIDEST] + line[-scan.WIDEST :]


def _kept(lines: list[bytes], shapes: list[bytes]) -> tuple[set[int], Templates]:
    """The numbers of the lines that are kept, and the templates of those that matter."""
    templates, known, crowd = Templates(), dict[bytes, Template](), Template(["*"])
    wanted: set[int] = set()
    crowded: list[int] = []
    for number, (line, shape) in enumerate(zip(lines, shapes, strict=True), 1):
        if keywords.matters(shape):
            key = scan.shape_key(shape)
            if key not in known and len(known) < scan.MINED and not templates.full:
                known[key] = templates.add(scan.text_of(line))
            if key not in known:
                crowded.append(number)
            if _early(known.get(key, crowd), number):
                wanted.update(range(max(1, number - 1), min(number + scan.context(shape), len(lines)) + 1))
    held = 0
    for count, number in enumerate(sorted(wanted, reverse=True), 1):
        held += scan.weight(scan.cut(lines[number - 1]))
        if held > scan.MEMORY or count > scan.MOST:
            wanted.discard(number)
    last = range(max(1, len(lines) - scan.TAIL + 1), len(lines) + 1)
    return wanted | set(crowded[-scan.LAST :]) | set(last), templates


def _early(template: Template, number: int) -> bool:
    """Whether the line of this number is among the first of a burst of a template."""
    template.lines_kept = 1 if number - template.last > scan.BURST else template.lines_kept + 1
    template.last = number
    return template.lines_kept <= scan.FIRST


def _not_finite(losses: list[Loss]) -> Loss | None:
    """The first of the losses that are no numbers since the last one that is."""
    first = None
    for loss in losses:
        first = None if math.isfinite(loss.value) else first or loss
    return first


VARIABLE = re.compile(r"0x[0-9a-f]+|(?<![a-z])[-+]?\d[\w.:,+/-]*|(?:/[\w.@+-]+){2,}/?|[\w.-]*\d{2,}[\w.-]*", re.I)


def masked_plain(line: str) -> list[str]:
    """What `scan.masked` gives, in one go over the whole line."""
    return VARIABLE.sub("*", line).split()[: scan.COMPARED]
