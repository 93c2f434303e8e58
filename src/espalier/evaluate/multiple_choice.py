"""Multiple-choice questions from a JSONL file: which choice does the model find likeliest after the question?

Each choice is scored by its log-likelihood as a continuation, and by the same divided by its length in bytes, so that a
long answer is not unlikely for its length alone (as `acc` and `acc_norm` of EleutherAI's lm-evaluation-harness).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
import xxhash

from espalier.language import generate, gpt, row_files
from espalier.language.kv_cache import Cache
from espalier.language.row_files import Row, SourceFile
from espalier.language.tokenizer import Tokenizer
from espalier.parallel.workload import Sums
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import Fields, FieldUse, parsing, printable

PLACES = 256
"""Tokens whose logits are there at a time."""


class Question(msgspec.Struct, frozen=True):
    """One line of the file: `question` (or `context`), `choices`, and `answer`, the position of the right one or its
    very text."""

    choices: tuple[str, ...]
    answer: int | str
    question: str = ""
    context: str = ""

    @property
    def right(self) -> int:
        """The position of the right choice."""
        return self.choices.index(self.answer) if isinstance(self.answer, str) else self.answer


COLUMNS = Fields("column", frozenset(Question.__struct_fields__), unit="question")


def read(path: Path, name: str, use: FieldUse | None = None) -> tuple[Question, ...]:
    """The questions in `path`, rows of JSON lines, JSON or Parquet; `use` counts columns that are not used.

    Raises UserError that names the line for anything that is not a question.
    """
    with parsing(f"--task {name}={path}", "name a JSONL file of questions"):
        size = path.stat().st_size
    entry = SourceFile(path.name, str(path), size, 0)
    form = row_files.look(entry, frozenset({"choices"}))
    form = "lines" if form in ("text", "document") else form
    rows = [] if form == "binary" or not size else row_files.rows(entry, form)
    use = use or FieldUse(COLUMNS)
    questions = []
    for place, row in rows:
        use.count(key for key, value in row.items() if value is not None)
        questions.append(_question(row, path, int(place.rpartition(":")[2])))
    if not questions:
        raise UserError(f"--task {name}={path} holds no question.", do="one JSON object a line; see docs/evaluate.md")
    return tuple(questions)


def _question(row: Row, path: Path, number: int) -> Question:
    given = {key: value for key, value in row.items() if key in COLUMNS.read and value is not None}
    try:
        question = msgspec.convert(given, Question)
    except (msgspec.ValidationError, ValueError) as error:
        raise _bad(path, number, printable(error)) from None
    choices = question.choices
    answer = question.answer
    why = ""
    if fault := row_files.encoding_fault("".join([question.question, question.context, *choices])):
        why = f"it {fault}"
    elif not (question.question or question.context):
        why = f"it has {printable(', '.join(row))}, and neither question nor context"
    elif len(choices) < 2 or not all(choices):
        why = "it needs two choices at least, none of them empty"
    elif isinstance(answer, str) and answer not in choices:
        why = f"the answer {answer!r} is none of its choices"
    elif isinstance(answer, int) and not 0 <= answer < len(choices):
        why = f"the answer {answer} is not within 0 to {len(choices) - 1}"
    if why:
        raise _bad(path, number, why)
    return question


def _bad(path: Path, number: int, why: str) -> UserError:
    example = '{"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}'
    return UserError(f"Line {number} of {path} is not a question.", why=why, do=example)


class MultipleChoice:
    """The questions of one file, for a model that reads what `tokenizer` makes of them. `notes`: columns that are not
    used."""

    def __init__(self, name: str, path: Path, tokenizer: Tokenizer) -> None:
        self.name = name
        self._tokenizer = tokenizer
        use = FieldUse(COLUMNS)
        self._questions = read(path, name, use)
        self.notes = use.notes()
        self.content = xxhash.xxh3_64_hexdigest(msgspec.json.encode(self._questions))

    @property
    def records(self) -> int:
        """One for each question."""
        return len(self._questions)

    def evaluate(self, model: gpt.GPT, record: int) -> Sums:
        """Whether the likeliest choice is the right one, by length and without regard to it."""
        question = self._questions[record]
        before = "\n".join(filter(None, (question.context, question.question)))
        space = "" if before[-1:].isspace() else " "
        continued = [choice if choice[:1].isspace() else space + choice for choice in question.choices]
        head = [self._tokenizer.boundary, *tokens_of(before, self._tokenizer)]
        scores = loglikelihoods(model, [(head, tokens_of(choice, self._tokenizer)) for choice in continued])
        return marks([total for total, _ in scores], question)

    def summary(self, means: Mapping[str, float]) -> Mapping[str, float]:
        """The shares of right answers."""
        return dict(means)


def tokens_of(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text."""
    return [int(token) for token in tokenizer.encode(text.encode())]


def marks(loglikelihoods: Sequence[float], question: Question) -> Sums:
    """Of a question whose choices have these log-likelihoods (nats)."""
    lengths = [len(choice.encode()) for choice in question.choices]
    by_length = [total / length for total, length in zip(loglikelihoods, lengths, strict=True)]
    return {
        "accuracy": (float(_likeliest(by_length) == question.right), 1.0),
        "accuracy_unnormalised": (float(_likeliest(loglikelihoods) == question.right), 1.0),
    }


def loglikelihoods(model: gpt.GPT, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
    """For each (context ids, continuation ids), neither empty: the continuation's log-likelihood in nats, and whether
    each of its tokens is the model's likeliest.

    What does not fit into the model's context is cut off on the left, as far as into the continuation itself, whose cut
    tokens then do not count.
    """
    rows = [[*head, *tail][-(model.size.context + 1) :] for head, tail in pairs]
    tails = [min(len(tail), len(row) - 1) for row, (_, tail) in zip(rows, pairs, strict=True)]
    scores = [(0.0, True)] * len(rows)
    for numbers in generate.groups([len(row) for row in rows]):
        together = _together(model, [rows[number] for number in numbers], [tails[number] for number in numbers])
        for number, score in zip(numbers, together, strict=True):
            scores[number] = score
    return scores


@torch.no_grad()
def _together(model: gpt.GPT, rows: Sequence[Sequence[int]], tails: Sequence[int]) -> list[tuple[float, bool]]:
    """Of the last `tails` tokens of each row. Logits are never there of more than `PLACES` tokens."""
    device = next(model.parameters()).device
    tokens, padding = generate.padded([row[:-1] for row in rows], device)
    wanted, _ = generate.padded([row[1:] for row in rows], device)
    cache = Cache(model.size.layers, padding)
    count, start, most = tokens.shape[1], 0, max(1, PLACES // len(rows))
    scored = torch.arange(count, device=device) >= count - torch.tensor(tails, device=device)[:, None]
    totals = torch.zeros(len(rows), dtype=torch.float64, device=device)
    likeliest = torch.ones(len(rows), dtype=torch.bool, device=device)
    while start < count:
        begun = max(start, count - max(tails))
        stop = min(start + generate.READ, begun + most, count)
        logits = model(tokens[:, start:stop], cache, last=max(1, stop - begun)).double().log_softmax(-1)
        start, part = stop, slice(stop - logits.shape[1], stop)
        chosen = logits.gather(2, wanted[:, part, None]).squeeze(2)
        totals += chosen.where(scored[:, part], 0.0).sum(1)
        likeliest &= ((logits.argmax(-1) == wanted[:, part]) | ~scored[:, part]).all(1)
    return list(zip(totals.tolist(), likeliest.tolist(), strict=True))


def _likeliest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)
