"""Chat rows: conversations as tokens of which some are answers, and several of them in each row of a batch.

Tokens are kept in the cache folder by the names, sizes and times of the files. Rows are filled by best fit, the longest
conversations first; a conversation sees itself only, and its positions start at 0.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from espalier.cache_dir import cache_folder, hashed, write_atomic
from espalier.config import Data
from espalier.errors import UserError
from espalier.language import text_sources
from espalier.language.gpt import IGNORED
from espalier.language.tokenizer import Tokenizer
from espalier.language.tune.chat_template import ChatTemplate
from espalier.language.tune.conversations import DOCSTRINGS, Conversation, Skipped, Turn, Unusable, conversations

Int64 = NDArray[np.int64]
Progress = Callable[[int, int], None]
_VERSION, _TOGETHER = 1, 1000
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
    """

    tokens: NDArray[Any]
    answers: NDArray[np.bool_]
    starts: Int64
    names: Sequence[str]
    pairs: bool
    skipped: Sequence[tuple[str, str]] = ()

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

    def at(self, chosen: Iterable[int]) -> ChatTokens:
        """Those conversations alone."""
        picked = list(chosen)
        each = [slice(int(self.starts[one]), int(self.starts[one + 1])) for one in picked]
        starts = np.cumsum([0, *(one.stop - one.start for one in each)], dtype=np.int64)
        tokens, answers = (
            np.concatenate([part[:0], *(part[one] for one in each)]) for part in (self.tokens, self.answers)
        )
        return ChatTokens(tokens, answers, starts, [self.names[one] for one in picked], self.pairs, self.skipped)


def joined(parts: Sequence[ChatTokens]) -> ChatTokens:
    """All of them, one after the other."""
    first = parts[0]
    lengths = np.concatenate([np.diff(one.starts) for one in parts])
    return ChatTokens(
        np.concatenate([one.tokens for one in parts]),
        np.concatenate([one.answers for one in parts]),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        [name for one in parts for name in one.names],
        first.pairs,
        [one for part in parts for one in part.skipped],
    )


# --- text to tokens ----------------------------------------------------------------------------------------------


def read(
    data: Data, tokenizer: Tokenizer, template: ChatTemplate, pairs: bool, progress: Progress | None = None
) -> ChatTokens:
    """The tokens of `data`, from the cache where they were made before. `pairs`: preferences are wanted.

    Raises UserError as `conversations` does, and where a preference is missing or the template is broken.
    """
    key = text_sources.listing(_listed(data)).key if not data.path.startswith("hf:") else None
    facts = [_VERSION, key, tokenizer.fingerprint, template.text, dict(template.tokens), pairs]
    file = cache_folder() / "chats" / f"{hashed(facts)}.npz"
    if key is not None and file.is_file():
        with contextlib.suppress(*_DAMAGED):
            return _load(file.read_bytes(), pairs)
    found = _encode(data, tokenizer, template, pairs, progress)
    if key is not None:
        with contextlib.suppress(OSError):  # without it the text is read again
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(file, dumps(found))
    return found


def _listed(data: Data) -> Data:
    return Data(path="python:stdlib") if data.path == DOCSTRINGS else data


def dumps(found: ChatTokens) -> bytes:
    """As an `.npz`."""
    out = io.BytesIO()
    names = np.array(found.names or [""], str)
    skipped = np.array(found.skipped or np.zeros((0, 2)), str).reshape(-1, 2)
    np.savez(out, tokens=found.tokens, answers=found.answers, starts=found.starts, names=names, skipped=skipped)
    return out.getvalue()


def _load(content: bytes, pairs: bool) -> ChatTokens:
    with np.load(io.BytesIO(content), allow_pickle=False) as opened:
        found = dict(opened)
    names, skipped = found["names"].tolist(), [(name, why) for name, why in found["skipped"].tolist()]
    return ChatTokens(found["tokens"], found["answers"], found["starts"], names, pairs, skipped)


loads = _load
"""What `dumps` gave."""


def _encode(
    data: Data, tokenizer: Tokenizer, template: ChatTemplate, pairs: bool, progress: Progress | None
) -> ChatTokens:
    skipped: Skipped = []
    names: list[str] = []
    tokens: list[NDArray[Any]] = [np.zeros(0, tokenizer.dtype)]
    answers: list[NDArray[np.bool_]] = [np.zeros(0, np.bool_)]
    texts = iter(_texts(conversations(data, skipped, progress, pairs), template, pairs, skipped))
    while part := list(islice(texts, _TOGETHER)):
        encoded = tokenizer.encode_marked([text for _, text, _ in part])
        for (name, _, spans), (ids, places) in zip(part, encoded, strict=True):
            names.append(name)
            tokens.append(ids)
            answers.append(_answers(places, spans))
    if not names:
        first = "; ".join(f"{name}: {reason}" for name, reason in skipped[:3])
        raise UserError(
            f"No conversation of data.path = {data.path!r} can be trained on.", why=first, do="see the reasons"
        )
    starts = np.cumsum([0, *(len(one) for one in tokens[1:])], dtype=np.int64)
    return ChatTokens(np.concatenate(tokens), np.concatenate(answers), starts, names, pairs, skipped)


def _texts(
    found: Iterable[Conversation], template: ChatTemplate, pairs: bool, skipped: Skipped
) -> Iterable[tuple[str, str, list[tuple[int, int]]]]:
    """(name, text, answers) of each conversation; of preferences both sides, and the answers after what they share."""
    for one in found:
        if pairs != bool(one.rejected):
            raise UserError(
                f"{one.name} is {'no' if pairs else 'a'} preference.",
                why=f'tune.kind = "dpo" {"needs" if pairs else "is needed for"} rows with chosen and rejected',
                do='tune.kind = "lora" or "full"' if pairs else 'tune.kind = "dpo"',
            )
        sides = [one.turns, one.turns[: one.shared] + one.rejected] if pairs else [one.turns]
        before = sum(turn.role == "assistant" for turn in one.turns[: one.shared])
        try:
            told = [_marked(template, side) for side in sides]
        except Unusable as reason:
            skipped.append((one.name, str(reason)))
            continue
        yield from ((one.name, text, spans[before:]) for text, spans in told)


def _marked(template: ChatTemplate, turns: Sequence[Turn]) -> tuple[str, list[tuple[int, int]]]:
    text, spans = template.marked(turns)
    if not spans:
        raise Unusable("the chat template leaves its answers out")
    return text, spans


def _answers(places: Int64, spans: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
    """Whether each token has a character of an answer."""
    found = np.zeros(len(places), np.bool_)
    for start, stop in spans:
        found |= (places[:, 0] < stop) & (places[:, 1] > start)
    return found


# --- which are held out, and how long they may be ------------------------------------------------------------------


def divided(found: ChatTokens, share: float, sequence: int, longer: str) -> tuple[ChatTokens, ChatTokens, list[str]]:
    """`found` for training and validation, and what is to be said of what is too long for a row of `sequence` tokens.

    What is held out depends on the tokens of a conversation alone. Raises UserError where nothing fits, or a side has
    nothing.
    """
    step = 2 if found.pairs else 1
    lengths = np.diff(found.starts)
    most = lengths.reshape(-1, step).max(1) if len(lengths) else lengths
    long = np.flatnonzero(most > sequence + 1)
    notes = _told(len(long), int(most.max(initial=0)), sequence, longer)
    kept = _shortened(found, sequence + 1) if longer == "cut" else found
    usable = np.ones(len(most), np.bool_)
    if longer == "drop":
        usable[long] = False
    usable &= (
        np.array([kept.answers[a + 1 : b].any() for a, b in pairwise(kept.starts.tolist())], bool)
        .reshape(-1, step)
        .all(1)
    )
    if usable.sum() < 2:
        raise UserError(
            f"{int(usable.sum())} conversations of {len(most)} can be trained on with train.sequence = {sequence}.",
            why="; ".join(notes) or "one is trained on, another is held out",
            do=f"train.sequence = {int(most.max(initial=2)) - 1}, or more data",
        )
    ids = np.flatnonzero(usable)
    marks = np.array([_hash(kept, int(one) * step) for one in ids], np.uint64)
    held = marks < np.uint64(min(round(share * _HASHES), _HASHES - 1))
    if held.all() or not held.any():  # one is moved to the other side
        held[int(np.argmin(marks))] = not held.any()
    each = [(ids[side][:, None] * step + np.arange(step)).reshape(-1).tolist() for side in (~held, held)]
    return kept.at(each[0]), kept.at(each[1]), notes


def _hash(found: ChatTokens, one: int) -> int:
    return xxhash.xxh3_64_intdigest(found.tokens[found.starts[one] : found.starts[one + 1]].astype("<u4").tobytes())


def _told(count: int, longest: int, sequence: int, longer: str) -> list[str]:
    if not count:
        return []
    became = "are left out" if longer == "drop" else "lose their ends"
    return [
        f"{count} conversations have more than train.sequence = {sequence} tokens and {became} (tune.longer = "
        f"{longer!r}); train.sequence={longest - 1} holds the longest"
    ]


def _shortened(found: ChatTokens, most: int) -> ChatTokens:
    keep = np.zeros(len(found.tokens), np.bool_)
    for start, stop in pairwise(found.starts.tolist()):
        keep[start : min(stop, start + most)] = True
    starts = np.concatenate([[0], np.cumsum(np.minimum(np.diff(found.starts), most))]).astype(np.int64)
    return ChatTokens(found.tokens[keep], found.answers[keep], starts, found.names, found.pairs, found.skipped)


# --- rows --------------------------------------------------------------------------------------------------------


def packed(lengths: Sequence[int] | Int64, sequence: int) -> list[list[int]]:
    """Which conversations stand in each row of `sequence` tokens: best fit, the longest first (a bin packing within
    11/9 of the fewest rows, Johnson 1973). The same for equal lengths on every machine."""
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens that are free, row), sorted
    for one in order:
        length = int(lengths[one])
        assert 0 < length <= sequence
        place = bisect.bisect_left(free, (length, -1))
        room, row = free.pop(place) if place < len(free) else (sequence, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(one)
        bisect.insort(free, (room - length, row))
    return rows


def filled(found: ChatTokens, rows: Sequence[Sequence[int]], sequence: int, padding: int) -> tuple[Int64, ...]:
    """Tokens, targets, positions and documents of `rows` of conversations, each int64 [rows, sequence].

    A target that is no part of an answer is `IGNORED`; what is left of a row is `padding`, a document of its own.
    """
    shape = len(rows), sequence
    tokens, targets = np.full(shape, padding, np.int64), np.full(shape, IGNORED, np.int64)
    positions, documents = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for row, members in enumerate(rows):
        place = 0
        for number, one in enumerate(members, start=1):
            start, stop = found.starts[one], found.starts[one + 1]
            here = slice(place, place + int(stop - start) - 1)
            tokens[row, here] = found.tokens[start : stop - 1]
            answers = found.answers[start + 1 : stop]
            targets[row, here][answers] = found.tokens[start + 1 : stop][answers]
            positions[row, here] = np.arange(here.stop - here.start)
            documents[row, here] = number
            place = here.stop
        positions[row, place:] = np.arange(sequence - place)
    return tokens, targets, positions, documents
