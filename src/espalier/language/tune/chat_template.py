"""Chat template: turns of a conversation as the text that a model was trained on, and which of it are answers.

Templates are Jinja, as in Hugging Face's tokenizer folders, and run in Jinja's sandbox with the names that transformers
gives them. Answers are what stands in `{% generation %}` blocks. A template without them is rendered turn by turn: an
answer is what its turn adds beyond the prompt for it, up to the end of the turn.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from espalier.errors import UserError
from espalier.foreign_files import read_text
from espalier.language.tokenizer import Tokenizer
from espalier.language.tokenizer_files import TEMPLATE
from espalier.language.tune.conversations import Turn, Unusable

FILE = TEMPLATE
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For tokenizers without a template of their own (OpenAI's ChatML)."""
_BEGIN, _END = "\x02", "\x03"
"""Round an answer while it is rendered."""

Span = tuple[int, int]
"""Characters `[start, stop)` of a text."""


@dataclass(frozen=True)
class ChatTemplate:
    """A template of `text`, with the names of special tokens. `origin`: where it is from, for messages."""

    text: str
    tokens: Mapping[str, str]
    origin: str

    def render(self, turns: Sequence[Turn], answering: bool = False) -> str:
        """The text of `turns`; with `answering`, up to where the assistant's next answer begins.

        Raises `Unusable` where the template refuses the turns, UserError where it is broken.
        """
        return self._render(turns, answering).replace(_BEGIN, "").replace(_END, "")

    def marked(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        """The text of `turns`, and where its answers stand, ends of turns included. Raises as `render`."""
        if any(_BEGIN in turn.content or _END in turn.content for turn in turns):
            raise Unusable("it holds control characters")
        return _cut(self._render(turns, False)) if self._has_marks else self._by_turns(turns)

    @cached_property
    def ending(self) -> str:
        """What ends an answer."""
        answer = "an answer"
        text, spans = self.marked([Turn("user", "a question"), Turn("assistant", answer)])
        return text[text.index(answer, spans[0][0]) + len(answer) : spans[0][1]]

    @property
    def _has_marks(self) -> bool:
        return "generation %}" in self.text.replace("generation-%}", "generation %}")

    def _by_turns(self, turns: Sequence[Turn]) -> tuple[str, list[Span]]:
        text, spans = self.render(turns), []
        for number, turn in enumerate(turns):
            if turn.role != "assistant":
                continue
            before, after = self.render(turns[:number], True), self.render(turns[: number + 1]).rstrip()
            if not (after.startswith(before) and text.startswith(after)):
                raise UserError(
                    f"The chat template of {self.origin} does not say which tokens are answers.",
                    why="it has no {% generation %} blocks, and what it makes of a turn depends on later ones",
                    do="a template with {% generation %} … {% endgeneration %} round answers, as tune.template",
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _render(self, turns: Sequence[Turn], answering: bool) -> str:
        from jinja2 import TemplateError

        messages = [{"role": turn.role, "content": turn.content} for turn in turns]
        try:
            found: str = self._compiled.render(messages=messages, add_generation_prompt=answering, **self.tokens)
        except _Refused as reason:
            raise Unusable(f"the chat template refuses it: {reason}") from None
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise UserError(
                f"The chat template of {self.origin} fails: {type(error).__name__}: {error}.",
                do="repair it, or name another file as tune.template",
            ) from None
        return found

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError

        try:
            return _environment().from_string(self.text)
        except TemplateError as error:
            raise UserError(
                f"The chat template of {self.origin} is no Jinja template: {error}.",
                do="repair it, or name another file as tune.template",
            ) from None


def open_template(file: str | None, tokenizer: Tokenizer, kept: Path | None = None) -> ChatTemplate:
    """The template in `file`, else that of the run (`kept`), of the tokenizer's folder, or ChatML. Raises UserError."""
    files = tokenizer.files
    if kept is not None and (kept / FILE).is_file():
        return ChatTemplate(read_text(kept / FILE), files.special_tokens, "the run")
    if file is not None:
        do = f"tune.template = {file!r} has to name a Jinja file"
        return ChatTemplate(read_text(Path(file).expanduser(), do), files.special_tokens, file)
    if files.template is not None:
        return ChatTemplate(files.template, files.special_tokens, files.origin)
    return ChatTemplate(CHATML, files.special_tokens, "ChatML")


def _cut(text: str) -> tuple[str, list[Span]]:
    """`text` without its marks, and what stood between them."""
    plain, spans, length = [], [], 0
    for number, piece in enumerate(text.split(_BEGIN)):
        inside, mark, rest = piece.partition(_END)
        if number and mark:
            spans.append((length, length + len(inside)))
        plain += [inside, rest]
        length += len(inside) + len(rest)
    return "".join(plain), spans


# --- Jinja -------------------------------------------------------------------------------------------------------


class _Refused(Exception):
    """What a template raises by `raise_exception`."""


def _environment() -> Any:
    """As transformers renders templates (`apply_chat_template`): sandboxed, blocks trimmed, with its functions."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    def refuse(message: str) -> None:
        raise _Refused(message)

    def as_json(value: Any, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    found = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    found.filters["tojson"] = as_json
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found
