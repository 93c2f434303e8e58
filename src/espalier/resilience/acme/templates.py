"""Lines of one form found together: a tree of templates that grows as lines come.

After Drain (He et al., ICWS 2017), which the failure study of arXiv 2403.07648 compresses logs with: first by the
number of words, then by the first word, then by the share of equal words. Own code instead of the library drain3: the
scan asks for a template once per new shape of a line only, and this is all it needs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from operator import eq

ALIKE = 0.5
"""Share of equal words from which two lines are of one form: the middle of Drain's 0.4 to 0.6."""
MOST = 2500
"""Templates: a line of each and the three round it are as many as a scan keeps."""
WORDS = 40
"""Words of a line that are compared."""
BRANCH = 32
"""Templates of one length and first word that are compared one by one."""

_VARIABLE = re.compile(r"0x[0-9a-f]+|(?<![a-z])[-+]?\d[\w.:,+/-]*|(?:/[\w.@+-]+){2,}/?|[\w.-]*\d{2,}[\w.-]*", re.I)


@dataclass(eq=False, slots=True)
class Template:
    """One form of line. Has state: its words, `*` where they differ, the number of the
    last line that had it, and how many were kept of its last burst."""

    words: list[str]
    last: int = 0
    kept: int = 0

    def __str__(self) -> str:
        return " ".join(self.words)


class Templates:
    """The forms seen so far. Has state."""

    def __init__(self) -> None:
        self._tree: dict[tuple[int, str], list[Template]] = {}
        self.found: list[Template] = []

    @property
    def full(self) -> bool:
        """Whether there are so many forms that one more would tell nothing."""
        return len(self.found) >= MOST

    def add(self, line: str) -> Template:
        """The template of `line`, which it may widen."""
        words = masked(line)
        first = words[0] if words and "*" not in words[0] else "*"
        branch = self._tree.setdefault((len(words), first), [])
        shared = [sum(map(eq, one.words, words)) for one in branch]
        most = max(shared, default=0)
        if branch and (len(branch) >= BRANCH or most >= ALIKE * len(words)):
            best = branch[shared.index(most)]
            best.words = [mine if mine == other else "*" for mine, other in zip(best.words, words, strict=True)]
            return best
        made = Template(words)
        branch.append(made)
        self.found.append(made)
        return made


def masked(line: str) -> list[str]:
    """The first words of a line, with `*` for what varies: word by word, as no variable holds a space, and words of
    letters alone hold none."""
    return [word if word.isalpha() else _VARIABLE.sub("*", word) for word in line.split(None, WORDS)[:WORDS]]


def masked_plain(line: str) -> list[str]:
    """The same in one go over the whole line: the plain form."""
    return _VARIABLE.sub("*", line).split()[:WORDS]
