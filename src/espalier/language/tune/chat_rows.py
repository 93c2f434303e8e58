"""Chat rows: conversations as tokens of which some are answers, and several of them in each row of a batch.

Tokens are kept in the cache folder by the names, sizes and times of the files. Rows are filled by best fit, the longest
conversations first; a conversation sees itself only, and its positions start at 0.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from espalier.kernels.linear_cross_entropy import IGNORED
from espalier.language import row_files, text_sources
from espalier.language.tokenizer import Tokenizer
from espalier.language.tune.chat_template import ChatTemplate
from espalier.language.tune.conversations import (
    DOCSTRINGS,
    ChatReport,
    Conversation,
    Skipped,
    Unusable,
    conversations,
)
from espalier.parallel.workload import Progress
from espalier.recipe import Data
from espalier.recipe.cache_dir import cache_folder, hashed, write_atomic
from espalier.recipe.errors import UserError
from espalier.recipe.offsets import offsets_of

Int64 = NDArray[np.int64]
_VERSION = 2
_TOGETHER = 1000
_DAMAGED = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)
_HASHES = 1 << 64


@dataclass(frozen=True)
class ChatTokens:
    """Conversations one after the other.

    Attributes:
        tokens: [tokens] ids; answers: bool [tokens], whether each is part of an answer.
        starts: int64 [conversations + 1], where each begins.
        names: of the conversations.
        pairs: whether conversations 2i and 2i + 1 are the chosen and the rejected side of a preference.
        skipped: (name, reason) of what was left out.
        notes: sentences on columns, keys and files that are not used.
        unused: of each conversation, how many of its columns and keys are not used; empty: not known.
    """

    tokens: NDArray[Any]
    answers: NDArray[np.bool_]
    starts: Int64
    names: Sequence[str]
    pairs: bool
    skipped: Sequence[tuple[str, str]] = ()
    notes: Sequence[str] = ()
    unused: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Int64:
        """Tokens of each that something follows."""
        return np.diff(self.starts) - 1

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens and answers."""
        digest = xxhash.xxh3_128(np.ascontiguousarray(self.tokens.astype("<u4")).tobytes())
        digest.update(np.packbits(self.answers).tobytes() + self.starts.astype("<i8").tobytes())
        return digest.hexdigest()

    def at(self, picked: Sequence[int]) -> ChatTokens:
        """Those conversations alone."""
        places = [slice(int(self.starts[number]), int(self.starts[number + 1])) for number in picked]
        starts = offsets_of(np.diff(self.starts)[picked])
        tokens, answers = (
            np.concatenate([part[:0], *(part[place] for place in places)]) for part in (self.tokens, self.answers)
        )
        names = [self.names[number] for number in picked]
        unused = [self.unused[number] for number in picked] if self.unused else ()
        return replace(self, tokens=tokens, answers=answers, starts=starts, names=names, unused=unused)


def joined(parts: Sequence[ChatTokens]) -> ChatTokens:
    """All of them, one after the other."""
    lengths = np.concatenate([np.diff(part.starts) for part in parts])
    return ChatTokens(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.answers for part in parts]),
        offsets_of(lengths),
        [name for part in parts for name in part.names],
        parts[0].pairs,
        [row for part in parts for row in part.skipped],
        [note for part in parts for note in part.notes],
        [count for part in parts for count in part.unused or [0] * len(part)],
    )


# --- text to tokens ----------------------------------------------------------------------------------------------


def read(
    data: Data, tokenizer: Tokenizer, template: ChatTemplate, pairs: bool, progress: Progress | None = None
) -> ChatTokens:
    """The tokens of `data`, from the cache where they were made before. `pairs`: preferences are wanted.

    Raises UserError as `conversations` does, and where a preference is missing or the template is broken.
    """
    listed = Data(path="python:stdlib") if data.path == DOCSTRINGS else data
    key = None if data.path.startswith("hf:") else text_sources.listing(listed).key
    facts = [_VERSION, key, tokenizer.fingerprint, template.text, dict(template.tokens), pairs]
    file = cache_folder() / "chats" / f"{hashed(facts)}.npz"
    if key is not None:
        with contextlib.suppress(*_DAMAGED):
            return loads(file.read_bytes(), pairs)
    tokens = _encode(data, tokenizer, template, pairs, progress)
    if key is not None:
        with contextlib.suppress(OSError):  # without it the text is read again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, dumps(tokens))
    return tokens


def dumps(chats: ChatTokens) -> bytes:
    """As an `.npz`."""
    out = io.BytesIO()
    texts = {"names": chats.names, "skipped": chats.skipped, "notes": chats.notes}
    lines = {name: np.frombuffer(msgspec.json.encode(list(rows)), np.uint8) for name, rows in texts.items()}
    unused = np.array(chats.unused, np.int32)
    arrays = {"tokens": chats.tokens, "answers": chats.answers, "starts": chats.starts, "unused": unused}
    np.savez(out, allow_pickle=False, **arrays, **lines)
    return out.getvalue()


def loads(content: bytes, pairs: bool) -> ChatTokens:
    """What `dumps` gave."""
    with np.load(io.BytesIO(content), allow_pickle=False) as opened:
        arrays = dict(opened)
    names, skipped, notes = (msgspec.json.decode(arrays[name].tobytes()) for name in ("names", "skipped", "notes"))
    left_out = [(name, reason) for name, reason in skipped]
    unused = arrays["unused"].tolist()
    return ChatTokens(arrays["tokens"], arrays["answers"], arrays["starts"], names, pairs, left_out, notes, unused)


class _Text(NamedTuple):
    """A conversation as its template writes it; `spans` are the characters of its answers."""

    name: str
    text: str
    spans: list[tuple[int, int]]
    unused: int


def _encode(
    data: Data, tokenizer: Tokenizer, template: ChatTemplate, pairs: bool, progress: Progress | None
) -> ChatTokens:
    skipped: Skipped = []
    report = ChatReport()
    rendered: list[_Text] = []
    tokens: list[NDArray[Any]] = []
    answers: list[NDArray[np.bool_]] = []
    talks = conversations(data, skipped, progress, pairs, report)
    texts = (text for talk in talks for text in _texts(talk, template, pairs, skipped, report))
    while part := list(islice(texts, _TOGETHER)):
        encoded = tokenizer.encode_marked([row.text for row in part])
        for row, (ids, places) in zip(part, encoded, strict=True):
            rendered.append(row._replace(text="", spans=[]))
            tokens.append(ids)
            answers.append(_answers(places, row.spans))
    if not rendered:
        raise UserError(
            f"No conversation of data.path = {data.path!r} can be trained on.",
            why=f"{len(skipped)} skipped ({row_files.summary(skipped)})",
            do="see the reasons; tune.template names another chat template",
        )
    starts = offsets_of([len(ids) for ids in tokens])
    names = [row.name for row in rendered]
    unused = [row.unused for row in rendered]
    both = np.concatenate(tokens), np.concatenate(answers)
    return ChatTokens(*both, starts, names, pairs, skipped, report.notes(), unused)


def _texts(
    talk: Conversation, template: ChatTemplate, pairs: bool, skipped: Skipped, report: ChatReport
) -> Iterator[_Text]:
    """The text of a conversation; of preferences both sides, with the answers after what they share. What is left out
    goes into `skipped`, keys that are not used into `report`."""
    if pairs != bool(talk.rejected):
        raise UserError(
            f"{talk.name} is {'no' if pairs else 'a'} preference.",
            why=f'tune.kind = "dpo" {"needs" if pairs else "is needed for"} rows with chosen and rejected',
            do='tune.kind = "lora" or "full"' if pairs else 'tune.kind = "dpo"',
        )
    sides = [talk.turns, talk.turns[: talk.shared] + talk.rejected] if pairs else [talk.turns]
    before = sum(turn.role == "assistant" for turn in talk.turns[: talk.shared])
    unread: list[str] = []
    try:
        texts = [template.marked(side, talk.variables, talk.masked, unread) for side in sides]
        if not all(spans[before:] for _, spans in texts):
            raise Unusable("the chat template leaves its answers out")
    except Unusable as reason:
        skipped.append((talk.name, str(reason)))
        return
    report.template_unused.count(set(unread))
    unused = len({*talk.unused_columns, *talk.unused_keys, *unread})
    yield from (_Text(talk.name, text, spans[before:], unused) for text, spans in texts)


def _answers(places: Int64, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each token has a character of an answer."""
    answers = np.zeros(len(places), np.bool_)
    for start, stop in spans:
        answers |= (places[:, 0] < stop) & (places[:, 1] > start)
    return answers


# --- which are held out, and how long they may be ------------------------------------------------------------------


def divided(chats: ChatTokens, share: float, sequence: int, longer: str) -> tuple[ChatTokens, ChatTokens, list[str]]:
    """`chats` for training and validation, and what is to be said of what is too long for a row of `sequence` tokens.

    What is held out depends on the tokens of a conversation alone. Raises UserError where nothing fits, or a side has
    nothing.
    """
    step = 2 if chats.pairs else 1
    most = np.diff(chats.starts).reshape(-1, step).max(1)
    long = most > sequence + 1
    shortened = _shortened(chats, sequence + 1) if longer == "cut" else chats
    places = pairwise(shortened.starts.tolist())
    answered = np.array([shortened.answers[a + 1 : b].any() for a, b in places], bool).reshape(-1, step).all(1)
    usable = answered & ~long if longer == "drop" else answered
    notes = _notes_on_length(long, usable, int(most.max(initial=0)), sequence, longer)
    if usable.sum() < 2:
        raise UserError(
            f"{int(usable.sum())} conversations of {len(most)} can be trained on with train.sequence = {sequence}.",
            why="; ".join(notes) or "one is trained on, another is held out",
            do=f"train.sequence = {int(most.max(initial=2)) - 1}, or more data",
        )
    ids = np.flatnonzero(usable)
    spans = zip(*shortened.starts[[ids * step, ids * step + 1]], strict=True)
    first = [shortened.tokens[start:stop].astype("<u4").tobytes() for start, stop in spans]
    marks = np.array([xxhash.xxh3_64_intdigest(tokens) for tokens in first], np.uint64)
    held_out = marks < np.uint64(min(round(share * _HASHES), _HASHES - 1))
    if held_out.all() or not held_out.any():  # one is moved to the other side
        held_out[int(np.argmin(marks))] = not held_out.any()
    each = [(ids[side][:, None] * step + np.arange(step)).reshape(-1).tolist() for side in (~held_out, held_out)]
    return shortened.at(each[0]), shortened.at(each[1]), notes


def _notes_on_length(long: Any, usable: Any, longest: int, sequence: int, longer: str) -> list[str]:
    """Of what is too long (bool, each), how many are cut and how many are left out."""
    if not long.any():
        return []
    cut = int((long & usable).sum())
    gone = int((long & ~usable).sum())
    parts = [f"{cut} lose their ends"] * (cut > 0) + [f"{gone} are left out, as no answer is left"] * (gone > 0)
    became = " and are left out" if longer == "drop" else f": {' and '.join(parts)}"
    return [
        f"{int(long.sum())} conversations have more than train.sequence = {sequence} tokens{became} "
        f"(tune.longer = {longer!r}); train.sequence={longest - 1} holds the longest"
    ]


def _shortened(chats: ChatTokens, most: int) -> ChatTokens:
    keep = np.zeros(len(chats.tokens), np.bool_)
    for start, stop in pairwise(chats.starts.tolist()):
        keep[start : min(stop, start + most)] = True
    starts = offsets_of(np.minimum(np.diff(chats.starts), most))
    return replace(chats, tokens=chats.tokens[keep], answers=chats.answers[keep], starts=starts)


# --- rows --------------------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int] | Int64, sequence: int) -> list[list[int]]:
    """Which conversations stand in each row of `sequence` tokens: best fit, the longest first (a bin packing within
    11/9 of the fewest rows, Johnson 1973). The same for equal lengths on every machine."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens that are free, row), sorted
    for chat in order:
        length = int(lengths[chat])
        assert 0 < length <= sequence
        place = bisect.bisect_left(free, (length, -1))
        room, row = free.pop(place) if place < len(free) else (sequence, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(chat)
        bisect.insort(free, (room - length, row))
    return rows


def filled(chats: ChatTokens, rows: Sequence[Sequence[int]], sequence: int, padding: int) -> tuple[Int64, ...]:
    """Tokens, targets, positions and documents of `rows` of conversations, each int64 [rows, sequence].

    A target that is no part of an answer is `IGNORED`; what is left of a row is `padding`, a document of its own.
    """
    shape = len(rows), sequence
    tokens = np.full(shape, padding, np.int64)
    targets = np.full(shape, IGNORED, np.int64)
    positions = np.zeros(shape, np.int64)
    documents = np.zeros(shape, np.int64)
    for row, members in enumerate(rows):
        place = 0
        for number, chat in enumerate(members, start=1):
            start = chats.starts[chat]
            stop = chats.starts[chat + 1]
            span = slice(place, place + int(stop - start) - 1)
            tokens[row, span] = chats.tokens[start : stop - 1]
            answers = chats.answers[start + 1 : stop]
            targets[row, span][answers] = chats.tokens[start + 1 : stop][answers]
            positions[row, span] = np.arange(span.stop - span.start)
            documents[row, span] = number
            place = span.stop
        positions[row, place:] = np.arange(sequence - place)
    return tokens, targets, positions, documents
