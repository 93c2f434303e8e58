"""Chat template: turns of a conversation as the text that a model was trained on, and which of it are answers.

Templates are Jinja, as in Hugging Face's tokenizer folders, and run in a sandbox with limits (`template_sandbox`), with
the names that transformers gives them. Answers are what stands in `{% generation %}` blocks. A template without them is
rendered turn by turn: an answer is what its turn adds beyond the prompt for it, up to the end of the turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import meta

from espalier.language.tokenizer import Tokenizer
from espalier.language.tokenizer_files import TEMPLATE
from espalier.language.tune import template_sandbox
from espalier.language.tune.row_formats import NOTHING, TURN_NAMES, Turn, Unusable, Variables
from espalier.language.tune.template_sandbox import BEGIN, END, Refused
from espalier.recipe.errors import EspalierError, UserError
from espalier.recipe.foreign_files import printable, read_text

FILE = TEMPLATE
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For tokenizers without a template of their own (OpenAI's ChatML)."""
_OWN = ("messages", "add_generation_prompt")
_ABSENT: Variables = {"tools": None, "documents": None}
"""What transformers gives a template of a conversation without them: templates ask for `none`."""

Span = tuple[int, int]
"""Characters `[start, stop)` of a text."""

Marked = tuple[str, list[Span]]
"""A text, and where its answers stand."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of `text`, with the names of special tokens. `origin`: where it is from, for messages."""

    text: str
    tokens: Mapping[str, str]
    origin: str

    def render(self, turns: Sequence[Turn], answering: bool = False, variables: Variables = NOTHING) -> str:
        """The text of `turns`; with `answering`, up to where the assistant's next answer begins. `variables`: tools,
        documents and others that the template knows.

        Raises `Unusable` where the template refuses the turns, UserError where it fails or passes a limit.
        """
        return _unmarked(self._render([_Message.of(turn) for turn in turns], answering, variables))

    def marked(
        self,
        turns: Sequence[Turn],
        variables: Variables = NOTHING,
        masked: frozenset[int] = frozenset(),
        unused: list[str] | None = None,
    ) -> Marked:
        """The text of `turns`, and where its answers stand, ends of turns included; those of the turns `masked` are
        left out. Keys of turns that the template does not read, and that may be left out, are appended to `unused`.

        Raises as `render`, and `Unusable` where what the template does not read changes the meaning.
        """
        if any(mark in text for text in _texts(turns, variables) for mark in (BEGIN, END)):
            raise Unusable("it holds control characters")
        strange = [name for name in variables if name not in self._variables or name in _OWN]
        if strange:
            raise Unusable(f"the chat template does not read its {printable(strange[0])!r}")
        messages = [_Message.of(turn) for turn in turns]
        marks = "generation %}" in self.text.replace("generation-%}", "generation %}")
        try:
            if marks:
                text, spans = _cut(self._render(messages, False, variables))
            else:
                text, spans = self._by_turns(messages, variables)
        except UserError:
            for message in messages:  # a turn that calls a tool may have no text, and the template knows no calls
                message.unread()
            raise
        names = {name for message in messages for name in message.unread()}
        if unused is not None:
            unused += sorted(names)
        numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if not masked:
            return text, spans
        if len(spans) != len(numbers):
            raise Unusable("the chat template does not say which answer is which, and one of them is not to be learned")
        return text, [span for span, number in zip(spans, numbers, strict=True) if number not in masked]

    @cached_property
    def ending(self) -> str:
        """What ends an answer."""
        answer = "an answer"
        text, spans = self.marked([Turn("user", "a question"), Turn("assistant", answer)])
        return text[text.index(answer, spans[0][0]) + len(answer) : spans[0][1]]

    @cached_property
    def _variables(self) -> frozenset[str]:
        with self._failing("is no Jinja template: "):
            return frozenset(meta.find_undeclared_variables(self._environment.parse(self.text)))

    def _by_turns(self, messages: Sequence[_Message], variables: Variables) -> Marked:
        text = _unmarked(self._render(messages, False, variables))
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = _unmarked(self._render(messages[:number], True, variables))
            after = _unmarked(self._render(messages[: number + 1], False, variables)).rstrip()
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"The chat template of {printable(self.origin)} does not say which tokens are answers.",
                    why="it has no {% generation %} blocks, and what it makes of a turn depends on later ones",
                    do="a template with {% generation %} … {% endgeneration %} round answers, as tune.template",
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, messages: Sequence[_Message], answering: bool, variables: Variables) -> str:
        conversation = {"messages": list(messages), "add_generation_prompt": answering}
        compiled = self._compiled
        with self._failing("fails: "):
            self._environment.clock.start([*messages, *variables.values()])
            text: str = compiled.render({**_ABSENT, **variables, **self.tokens, **conversation})
        return text

    @contextmanager
    def _failing(self, fails: str) -> Iterator[None]:
        """Turns whatever a template raises into `Unusable` or UserError."""
        try:
            yield
        except Refused as reason:
            raise Unusable(f"the chat template refuses it: {printable(reason)}") from None
        except (EspalierError, Unusable):
            raise
        except Exception as error:  # a template can raise anything
            raise UserError(
                f"The chat template of {printable(self.origin)} {fails}{type(error).__name__}: {printable(error)}.",
                do="repair it, or name another file as tune.template",
            ) from None

    @cached_property
    def _environment(self) -> template_sandbox.Sandbox:
        return template_sandbox.Sandbox()

    @cached_property
    def _compiled(self) -> Any:
        with self._failing("is no Jinja template: "):
            return self._environment.from_string(self.text)


class _Message(dict[str, Any]):
    """A turn as the template is given it. Remembers which of its keys are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._read: set[Any] = set()

    @classmethod
    def of(cls, turn: Turn) -> _Message:
        """Role and content, or all that the turn has."""
        return cls(turn.message or {"role": turn.role, "content": turn.content})

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(key)
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """See dict: all are read, also by `tojson`."""
        self._read.update(super().keys())
        return super().items()

    def values(self) -> Any:
        """See dict: all are read."""
        return [value for _, value in self.items()]

    def unread(self) -> list[str]:
        """Keys that were not read and may be left out. Raises `Unusable` for others: they change what is meant."""
        if dict.get(self, "content") and "content" not in self._read:
            raise Unusable(f"the chat template leaves out its turn of {printable(dict.get(self, 'role'))!r}")
        names = [name for name in self.keys() if name in TURN_NAMES and name not in self._read]
        harmless = ("tool_call_id", "name") if dict.get(self, "role") == "tool" else ()
        strange = next((name for name in names if name not in harmless), None)
        if strange is not None:
            raise Unusable(f"the chat template does not read {strange!r} of its turns")
        return names


def _texts(turns: Sequence[Turn], variables: Variables) -> Iterator[str]:
    """All that the template is given, what is no plain text as JSON without its escapes of control characters."""
    values = [variables, *(turn.message for turn in turns if turn.message is not None)]
    yield from (turn.content or "" for turn in turns)
    plain = (json.dumps(value, default=str).replace("\\\\", "") for value in values)  # no escaped backslashes
    yield from (text.replace("\\u0002", BEGIN).replace("\\u0003", END) for text in plain)


def _unmarked(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


def open_template(file: str | None, tokenizer: Tokenizer, run: Path | None = None) -> ChatTemplate:
    """The template in `file`, else that in the folder `run`, of the tokenizer's folder, or ChatML. Raises UserError."""
    files = tokenizer.files
    tokens = files.special_tokens
    if run is not None and (run / FILE).is_file():
        return ChatTemplate(read_text(run / FILE), tokens, "the run")
    if file is not None:
        do = f"tune.template = {file!r} has to name a Jinja file"
        return ChatTemplate(read_text(Path(file).expanduser(), do), tokens, file)
    if (text := files.template) is None:
        return ChatTemplate(CHATML, tokens, "ChatML")
    known = tokenizer.table()
    for role, token in tokens.items():
        if role in text and token not in known:  # which would be read as plain text
            raise UserError(
                f"The chat template writes {role} = {printable(token)!r}, which is not in tokenizer.json.",
                do="save the tokenizer with it, or name another template as tune.template",
            )
    return ChatTemplate(text, tokens, files.origin)


def _cut(text: str) -> Marked:
    """`text` without its marks, and what stood between them."""
    plain = []
    spans = []
    length = 0
    for number, piece in enumerate(text.split(BEGIN)):
        inside, mark, rest = piece.partition(END)
        if number and mark:
            spans.append((length, length + len(inside)))
        plain += [inside, rest]
        length += len(inside) + len(rest)
    return "".join(plain), spans
