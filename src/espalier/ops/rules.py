"""Diagnosis rules are data: a pattern, the reason it speaks for, and whether it is a cause or follows from one.

After the rule set of arXiv 2403.07648, section on diagnosis. The product's own stand in rules.toml beside this file;
users add theirs, which are asked first.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from espalier.ops.taxonomy import ACTIONS, REASONS, Action
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import parsing, read_text

Role = Literal["hardware", "root", "exception", "cascade", "echo", "exit", "healthy", "noise"]
ROLES: tuple[Role, ...] = get_args(Role)
"""hardware: the machine says so itself, which outweighs what programs say; root: a cause; exception: known by the class
of an exception alone; cascade: another rank's fault seen from here; echo: only that others gave up; exit: only that
something ended; healthy: the job has done its work; noise: looks alarming and is not."""

_KEYS = ("id", "patterns", "reason", "role", "action", "unless", "after", "advice", "span")


@dataclass(frozen=True)
class LogRule:
    """One rule.

    Attributes:
        id: its name.
        patterns: any of these in a line is evidence; groups called `rank` and `node` name whose fault it is.
        words: for each pattern texts in lower case of which every line that it matches holds one.
        reason: of the taxonomy; empty for the roles that speak for none.
        role: see `ROLES`.
        action, advice: instead of the reason's own; empty: the reason's.
        unless: a line that this matches is no evidence.
        after: ids of rules; where one of these was found before, that line is the root and this rule's the reason.
        span: noise: so many further lines of the same rank are noise too.
    """

    id: str
    patterns: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    reason: str
    role: Role
    action: Action | Literal[""] = ""
    advice: str = ""
    unless: str = ""
    after: tuple[str, ...] = ()
    span: int = 0

    def excuses(self, text: str) -> bool:
        """Whether a line's text is no evidence whatever the patterns say."""
        return bool(self.unless) and compiled(self.unless).search(text) is not None


class Book:
    """Rules, and for every three letters which of their patterns a line that holds them may match."""

    def __init__(self, rules: Sequence[LogRule]) -> None:
        self.rules = tuple(rules)
        self._by_letters: dict[str, list[tuple[int, int]]] = {}
        self._always: list[tuple[int, int]] = []
        for at, rule in enumerate(self.rules):
            for number, texts in enumerate(rule.words):
                for text in texts:
                    letters = _rarest(text)
                    place = self._by_letters.setdefault(letters, []) if letters else self._always
                    place.append((at, number))

    def first(self, text: str) -> tuple[LogRule, re.Match[str]] | None:
        """The first rule that a line's text is evidence for, as asking one after the other would find it."""
        lower = text.lower()
        letters = {lower[at : at + 3] for at in range(len(lower) - 2)} & self._by_letters.keys()
        maybe = {number for three in letters for number in self._by_letters[three]}
        done = -1
        for at, number in sorted(maybe.union(self._always)):
            rule = self.rules[at]
            if at == done or not any(word in lower for word in rule.words[number]):
                continue
            match = compiled(rule.patterns[number]).search(text)
            if match is None:
                continue
            done = at  # its other patterns are not asked: `unless` speaks for the rule
            if not rule.excuses(text):
                return rule, match
        return None


_RARE = "etaoinsrhldcu mfpgwybvkxjqz"
"""Letters, the most frequent in English first."""


def _rarest(text: str) -> str:
    """The three letters in a row of a text that other lines hold least often; empty of shorter ones."""
    threes = [text[at : at + 3] for at in range(len(text) - 2)]
    return max(threes, key=lambda three: sum(_RARE.find(letter) % 99 for letter in three), default="")


@cache
def book(rules: tuple[LogRule, ...]) -> Book:
    """The book of these rules."""
    return Book(rules)


@cache
def built_in_rules() -> tuple[LogRule, ...]:
    """The product's rules, in the order they are asked."""
    return read(Path(__file__).with_name("rules.toml"))


def with_users(path: str | Path | None) -> tuple[LogRule, ...]:
    """The rules of the user's file `path`, then the product's. Raises UserError."""
    return built_in_rules() if path is None else (*read(path), *built_in_rules())


def read(path: str | Path) -> tuple[LogRule, ...]:
    """The rules of a TOML file with tables `[[rule]]`.

    Raises:
        UserError: it cannot be read, or a rule is wrong; names the rule and the place.
    """
    with parsing(path, "name a TOML file of rules; see docs/diagnose.md for an example"):
        table = tomllib.loads(read_text(Path(path)))
    entries = table.get("rule")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"--rules {path} holds no rules.", do="write each as a table [[rule]]; docs/diagnose.md shows one"
        )
    return tuple(make(entry, f"{path}: rule {at}") for at, entry in enumerate(entries, 1))


def make(entry: dict[str, Any], place: str) -> LogRule:
    """The rule that a table describes; `place` names it in errors. Raises UserError."""
    place = f"{place} ({entry['id']})" if isinstance(entry.get("id"), str) else place
    for key in entry:
        if key not in _KEYS:
            near = nearest(key, _KEYS)
            raise UserError(
                f"{place}: there is no key {key!r}.", do=f"did you mean {near}?" if near else ", ".join(_KEYS)
            )
    role = one_of(entry, "role", ROLES, place, "root")
    failure = role not in ("healthy", "noise")
    reason = one_of(entry, "reason", tuple(REASONS), place, None if failure else "")
    patterns = entry.get("patterns")
    if not isinstance(patterns, list) or not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise UserError(f"{place}: patterns must be a list of regular expressions.", do='patterns = ["CUDA error: .*"]')
    words = tuple(_certain(pattern, f"{place}: pattern {at}") for at, pattern in enumerate(patterns, 1))
    unless = str(entry.get("unless", ""))
    _certain(unless, f"{place}: unless")
    return LogRule(
        id=str(entry.get("id") or place),
        patterns=tuple(patterns),
        words=words,
        reason=reason,
        role=role,  # type: ignore[arg-type]
        action=one_of(entry, "action", ACTIONS, place, ""),  # type: ignore[arg-type]
        advice=str(entry.get("advice", "")),
        unless=unless,
        after=tuple(entry.get("after", ())),
        span=int(entry.get("span", 0)),
    )


def one_of(entry: dict[str, Any], key: str, known: Sequence[str], place: str, default: str | None = None) -> str:
    """The value of `key`, one of those `known`. Raises UserError where it is another one, or is missing."""
    value = entry.get(key, default)
    if value == default and default is not None:
        return default
    if value not in known:
        near = nearest(str(value), known)
        do = f"did you mean {near!r}?" if near else f"one of {', '.join(known)}"
        raise UserError(f"{place}: {key} = {value!r} is not known.", do=do)
    return str(value)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of a rule, compiled when a line may first match it: most never are."""
    return re.compile(pattern, re.I)


def _certain(pattern: str, place: str) -> tuple[str, ...]:
    """Texts of which every match of `pattern` holds one, in lower case, the longest that can be told; `("",)`: none.

    Raises UserError naming the place where it is no regular expression.
    """
    try:
        return _one_of_these(re._parser.parse(pattern, re.I))  # type: ignore[attr-defined]
    except re.error as error:
        at = f" at character {error.pos + 1}" if error.pos is not None else ""
        raise UserError(
            f"{place} is not a regular expression: {error.msg}{at}.",
            why=pattern,
            do="correct it there; \\ before ( [ . *",
        ) from None


def _one_of_these(parsed: Any) -> tuple[str, ...]:
    texts: list[tuple[str, ...]] = [("",)]
    run = ""
    for kind, value in parsed:
        name = str(kind)
        if name == "LITERAL" and chr(value).isascii():
            run += chr(value).lower()
            continue
        texts.append((run,))
        run = ""
        if name == "SUBPATTERN":
            texts.append(_one_of_these(value[3]))
        elif name == "BRANCH":
            texts.append(tuple(text for part in value[1] for text in _one_of_these(part)))
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and value[0] > 0:
            texts.append(_one_of_these(value[2]))
    texts.append((run,))
    return max(texts, key=lambda texts: (min(map(len, texts)), -len(texts)))
