"""Template sandbox: Jinja as transformers renders chat templates, with limits of time and size.

Jinja's sandbox keeps a template from the machine, but not from endless loops and strings of gigabytes. Here each turn
of a loop, call, filter and operation looks at the processor time, and at the size of what it would make. This needs
neither a worker nor a signal, so it works in every thread.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from types import GeneratorType
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

SECONDS = 2.0
"""Processor time of one rendering; templates of models take milliseconds."""
LARGEST = 1 << 24
"""Characters of a value that a template may make on the way."""
OUTPUT = 1 << 20
"""Characters that a template may make of a conversation, beyond twice its own."""
MOST_PARTS = 1 << 18
"""Parts of a value that a template may make, at all depths together."""
_INTEGER_BITS = 1 << 16
_EVERY = 16
BEGIN, END = "\x02", "\x03"
"""Round an answer while it is rendered."""
_STRETCHING = frozenset({"ljust", "rjust", "center", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice"})
_NESTED_WIDTH = re.compile(r"%[^a-zA-Z]*\*|:[^{}]*\{")


class Refused(Exception):
    """What a template raises by `raise_exception`."""


class LimitReached(Exception):
    """A template takes too long, or makes too much."""


class RenderingClock(threading.local):
    """When the rendering of a thread has to end, in seconds of its processor time, and the characters it may make."""

    end = 0.0
    steps = 0
    output = OUTPUT

    def start(self, conversation: Any) -> None:
        """A rendering begins, of a conversation."""
        self.end = time.thread_time() + SECONDS
        self.steps = 0
        self.output = OUTPUT + 2 * len(str(conversation))

    def check(self) -> None:
        """Raises `LimitReached`; looks at the clock in one of `_EVERY` steps."""
        self.steps += 1
        if self.steps % _EVERY == 0 and time.thread_time() > self.end:
            raise LimitReached(f"it takes more than {SECONDS:.0f} seconds")


class _Counted:
    """An iterable that looks at the clock in each turn; with a length where that has one, as `loop.length` asks."""

    def __init__(self, clock: RenderingClock, values: Any) -> None:
        self._clock = clock
        self._values = values

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._clock.check()
            yield value

    def __len__(self) -> int:
        return len(self._values)


def size(*values: Any) -> int:
    """Characters and parts of values, at all depths together. Raises `LimitReached` where there are too many."""
    count = 0
    parts = 0
    waiting = list(values)
    while waiting:
        value = waiting.pop()
        parts += 1
        if isinstance(value, str | bytes):
            count += len(value)
        elif isinstance(value, list | tuple | dict | Namespace):
            parts += len(value) if isinstance(value, list | tuple) else 0
            if parts <= MOST_PARTS:
                waiting += _inner(value)
        if count > LARGEST or parts > MOST_PARTS:
            raise LimitReached("it makes too large a value")
    return count + parts


def _inner(value: Any) -> list[Any]:
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    return [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else list(value)


def _limit(count: int) -> None:
    if count > LARGEST:
        raise LimitReached("it makes too large a value")


def _check_formatted(text: str, values: Any) -> None:
    """Of `%`, `format`: each field may hold all values, and be as wide as a number says."""
    widths = [int(digits) for digits in re.findall(r"\d+", text)]
    if _NESTED_WIDTH.search(text):
        parts = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        widths += [abs(part) for part in parts if isinstance(part, int)]
    _limit(len(text) + (text.count("%") + text.count("{")) * (size(values) + max(widths, default=0)))


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "%":
        if isinstance(left, str):
            _check_formatted(left, right)
    elif operator == "+":
        _limit(len(left) + len(right)) if isinstance(left, str) and isinstance(right, str) else size(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        _limit(bits * (LARGEST // _INTEGER_BITS))
    elif operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                _limit(size(value) * times)
                _limit(times * isinstance(value, list | tuple) * (LARGEST // MOST_PARTS))


def _check_call(name: str, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raises `LimitReached` for a method or filter that would make too much of its first value."""
    first, *others = values or (None,)
    others += named.values()
    parts = size(first, *others)
    widest = max(
        (len(value) if isinstance(value, str) else abs(value) for value in others if isinstance(value, str | int)),
        default=0,
    )
    if name in _STRETCHING or (name == "tojson" and widest):
        _limit(size(first) * widest)
    elif name == "replace" and isinstance(first, str) and len(others) > 1:
        _limit(first.count(str(others[0])) * len(str(others[1])) + len(first))
    elif name == "join" and others:
        listed, text = (first, others[0]) if isinstance(others[0], str) else (others[0], first)
        _limit(parts + len(text) * size(listed) if isinstance(text, str) else parts)
    elif name in ("format", "format_map") and isinstance(first, str):
        _check_formatted(first, tuple(others))
    elif name == "sum" and any(isinstance(value, str | list | tuple) for value in others):
        raise LimitReached("it adds up lists")


class _Generation(Extension):
    """`{% generation %}`: what stands in it is an answer."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{BEGIN}{caller()}{END}"


def _filtered(node: Any, name: str) -> Any:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Limits(NodeTransformer):
    """Puts filters that look at time and size where Jinja calls nothing that can be overridden."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802 - names of Jinja's nodes
        """Each turn of a loop counts."""
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "counted")
        return node

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        """`a ~ b` becomes `[a, b] | join`, which is the same and limited."""
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), "join")

    def _sized(self, node: Any) -> Any:
        """Values that hold others twice, and these others twice, are stopped where they are made."""
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _filtered(node, "sized")

    visit_List = visit_Tuple = visit_Dict = _sized  # noqa: N815


class Sandbox(ImmutableSandboxedEnvironment):
    """As transformers renders templates (`apply_chat_template`): blocks trimmed, with its functions; and with limits.

    `clock.start()` precedes each rendering.
    """

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_sized)
        self.clock = RenderingClock()
        self.concat = self._concatenated  # type: ignore[method-assign]
        filters = {**self.filters, "tojson": _as_json, "sized": _sized}
        self.filters |= {name: self._limited(name, function) for name, function in filters.items()}
        self.filters["counted"] = functools.partial(_Counted, self.clock)
        self.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> Any:
        return _Limits().visit(super()._parse(source, name, filename)).set_environment(self)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.clock.check()
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *values: Any, **named: Any) -> Any:  # noqa: N805 - as Jinja names them
        __self.clock.check()
        listed = tuple(map(_listed, values))
        owner = getattr(__obj, "__self__", None)
        owned = (owner, *listed) if isinstance(owner, str | list | dict) else listed
        _check_call(getattr(__obj, "__name__", ""), owned, named)
        return super().call(__context, __obj, *listed, **named)

    def wrap_str_format(self, value: Any) -> Any:
        """See SandboxedEnvironment: `str.format`, of which it hides whose it is."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*values: Any, **named: Any) -> Any:
            _check_formatted(value.__self__, (*values, *named.values()))
            return wrapped(*values, **named)

        return checked

    def _concatenated(self, pieces: Iterable[str]) -> str:
        texts = []
        count = 0
        for text in pieces:
            texts.append(text)
            count += len(text)
            if count > self.clock.output:
                raise LimitReached(f"it makes more than {self.clock.output:,} characters")
        return "".join(texts)

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*values: Any, **named: Any) -> Any:
            self.clock.check()
            listed = tuple(map(_listed, values))
            arguments = tuple(value for value in listed if not isinstance(value, Context | Environment | EvalContext))
            _check_call(name, arguments, named)
            return function(*listed, **named)

        return checked


def _listed(value: Any) -> Any:
    """A list for what is made while it is gone through, so that its size is known."""
    return list(value) if isinstance(value, GeneratorType | range) else value


def _sized(value: Any) -> Any:
    if not isinstance(value, str):  # the size of text is looked at where it is put together
        size(value)
    return value


def _refuse(message: str) -> None:
    raise Refused(message)


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})
