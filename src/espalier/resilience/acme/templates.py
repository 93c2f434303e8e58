"""Lines of one form found together: a tree of templates that grows as lines come.

After Drain (He et al., ICWS 2017), which the failure study of arXiv 2403.07648 compresses logs with: first by the
number of words, then by the first word, then by the share of equal words. Own code instead of the library drain3: the
scan asks for a template once per new shape of a line only, and this is all it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ALIKE = 0.5
"""Share of equal words from which two lines are of one form: the middle of Drain's 0.4 to 0.6."""
MOST = 20_000
"""Templates; later forms share the template of their length."""
WORDS = 40
"""Words of a line that are compared."""
BRANCH = 32
"""Templates of one length and first word that are compared one by one."""

_VARIABLE = re.compile(r"0x[0-9a-f]+|(?<![a-z])[-+]?\d[\w.:,+/-]*|(?:/[\w.@+-]+){2,}/?|[\w.-]*\d{2,}[\w.-]*", re.I)


@dataclass(eq=False)
class Template:
    """One form of line. Has state: its words, `*` where they differ, how many lines had
    it, the number of the last of them, and how many were kept."""

    words: list[str]
    count: int = 0
    last: int = 0
    kept: int = 0

    def __str__(self) -> str:
        return " ".join(self.words)


class Templates:
    """The forms seen so far. Has state."""

    def __init__(self) -> None:
        self._tree: dict[tuple[int, str], list[Template]] = {}
        self.found: list[Template] = []

    def add(self, line: str) -> Template:
        """The template of `line`, which it may widen."""
        words = _VARIABLE.sub("*", line).split()[:WORDS]
        crowded = len(self.found) >= MOST
        first = words[0] if words and "*" not in words[0] and not crowded else "*"
        branch = self._tree.setdefault((len(words), first), [])
        best = max(branch, key=lambda one: _alike(one.words, words), default=None)
        full = crowded or len(branch) >= BRANCH
        if best is not None and (full or _alike(best.words, words) >= ALIKE):
            best.words = [mine if mine == other else "*" for mine, other in zip(best.words, words, strict=True)]
            return best
        made = Template(words)
        branch.append(made)
        self.found.append(made)
        return made


def _alike(one: list[str], other: list[str]) -> float:
    if not one:
        return 1.0
    return sum(mine == theirs for mine, theirs in zip(one, other, strict=True)) / len(one)
