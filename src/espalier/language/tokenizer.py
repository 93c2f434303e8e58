"""How text becomes numbers: plain bytes, a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus.

Byte-level BPE after Sennrich et al. (1508.07909) and GPT-2's alphabet of 256 printable characters.
"""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from espalier.language import tokenizer_files
from espalier.language.tokenizer_files import CONFIG, EOS, ID_KEYS, TOKENIZER, TokenizerFiles, formatted, listed
from espalier.recipe import cache_dir
from espalier.recipe.cache_dir import write_atomic
from espalier.recipe.errors import UserError, nearest
from espalier.recipe.foreign_files import JsonObject, decoded, printable

Ids = NDArray[np.unsignedinteger[Any]]
Corpus = Callable[[], Iterable[str]]

SAMPLE = 32 << 20
"""Characters of the corpus a BPE is trained on, at most (31 M take 6 s on 2 cores)."""

PIECE = 1 << 20
"""Bytes encoded at once. A longer document is cut at line ends, which bounds memory."""

END_OF_TEXT = "<|endoftext|>"
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
_BOUNDARIES = (*_ENDS, "<|begin_of_text|>", "<s>", "<bos>", "\0")
SPARSEST = 1 << 20
"""Ids that a tokenizer may always have, however few tokens it names."""


MarkedIds = tuple[Ids, NDArray[np.int64]]
"""Ids, and the characters `[start, stop)` that each stands for, [tokens, 2]."""


class Tokenizer(Protocol):
    """Text to token ids and back. Ids are below `vocabulary`.

    In training text `boundary` stands before every document and `document_end` after it.
    """

    name: str
    vocabulary: int
    boundary: int
    document_end: tuple[int, ...]
    """The end of a text, where the boundary is only its beginning (`<s>` text `</s>`); else empty."""
    adds_boundary: bool
    """Whether other programs put the boundary before a text, as its files tell them."""
    files: TokenizerFiles
    """What is kept of it and exported, with its special tokens and chat template."""
    byte_lengths: NDArray[np.int32]
    """Bytes of text each id stands for, [vocabulary]; 0 for the boundary. Over a document they sum to its size exactly
    for bytes and byte-level BPE; for other tokenizers (normalised text, word-start marks) nearly."""
    fingerprint: str
    """Equal for tokenizers that encode alike, on every machine."""

    dtype: np.dtype[Any]
    """The smallest unsigned type that holds every id: uint8, uint16 or uint32."""

    def encode(self, text: bytes) -> Ids:
        """Ids of UTF-8 `text`, [tokens], of `dtype`; no boundary is added."""

    def encode_many(self, texts: Sequence[bytes]) -> list[Ids]:
        """`encode` of each text, on all cores where the tokenizer can."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[str]) -> list[MarkedIds]:
        """Ids of texts in which names of special tokens mean these tokens, and the characters `[start, stop)` that each
        id stands for, [tokens, 2]."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, boundaries left out, broken characters replaced by U+FFFD."""

    def with_template(self, text: str) -> Self:
        """The same with the chat template `text` in its files. The prefix stays where the template has it too: other
        programs then drop one of both."""
        bos = self.files.special_tokens.get("bos_token")
        has_bos = "bos_token" in text or bool(bos and bos in text)
        return self._with(self.files.with_template(text), self.adds_boundary and has_bos)

    def with_end(self, number: int) -> Self:
        """The same, whose files tell other programs to end a text at the token `number` too."""
        return self._with(self.files.with_end(number, self.token_ids()), self.adds_boundary)

    def without_prefix(self) -> Self:
        """The same, whose files tell other programs to put nothing before a text."""
        return self._with(self.files.without_prefix(), False)

    def _with(self, files: TokenizerFiles, adds_boundary: bool) -> Self:
        made = copy.copy(self)
        made.files = files
        made.adds_boundary = adds_boundary
        return made

    def ends(self) -> Sequence[int]:
        """The ids at which other programs end a text, as its files tell them."""
        return self.files.ends or listed(self.token_ids().get(EOS))

    def token_ids(self) -> JsonObject:
        """`bos_token_id`, `eos_token_id` and `pad_token_id` for the model's `config.json`."""
        if self.files.model_ids is not None:
            return self.files.model_ids
        ids = {f"{role}_id": self.table().get(text) for role, text in self.files.special_tokens.items()}
        return dict.fromkeys(ID_KEYS[:2]) | {key: ids[key] for key in ID_KEYS if ids.get(key) is not None}

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and the files beside it as Hugging Face reads them."""
        self.files.write(folder)

    def table(self) -> dict[str, int]:
        """The id of each token, in the letters of `tokenizer.json`."""


def open_tokenizer(spec: str, corpus: Corpus | None = None, cache: Path | None = None) -> Tokenizer:
    """The tokenizer `spec` names: `bytes`, `bpe:SIZE`, or a path to a `tokenizer.json` or to its folder.

    `bpe:SIZE` is trained on `corpus()` once and kept in the folder `cache`, which must belong to that corpus.
    Raises UserError for an unknown spec, a size below 257, a file that is missing or no tokenizer, a missing extra.
    """
    if spec in ("bytes", "auto"):
        return ByteTokenizer()
    if spec.startswith("bpe:"):
        return _open_bpe(spec, corpus, cache)
    path = Path(spec).expanduser()
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return _opened(path, spec)
    near = nearest(spec, ["bytes", "bpe:8192"])
    hint = f"did you mean {near}? " if near else ""
    raise UserError(
        f"data.tokenizer = {spec!r} is neither a tokenizer nor a file.",
        do=hint + "known: bytes, bpe:SIZE (such as bpe:8192), a path to a tokenizer.json",
    )


def kept_tokenizer(spec: str, folder: Path) -> Tokenizer:
    """The tokenizer that `spec` named when `save` wrote it into `folder`, whatever `spec` names now."""
    return ByteTokenizer() if spec in ("bytes", "auto") else _opened(folder / TOKENIZER, spec)


def _opened(path: Path, spec: str) -> Tokenizer:
    files = tokenizer_files.read(path)
    with _reading(path):
        _try_out(files.contents[TOKENIZER])
        return HfTokenizer(_library().Tokenizer.from_str(decoded(files.contents[TOKENIZER], path)), spec, files)


_TRIAL = """
import resource, sys
sys.path[:] = sys.argv[1:]
import tokenizers
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
inner = tokenizers.Tokenizer.from_str(sys.stdin.buffer.read().decode("utf-8-sig"))
inner.no_truncation()
inner.no_padding()
for text in ("", "a", "A text, n\u00e4ive.\\n\\t 12", "e\u0301 \U0001f600 \u6f22"):
    for encoded in (inner.encode(text), *inner.encode_batch_fast([text], add_special_tokens=False)):
        inner.decode(encoded.ids)
"""
_TRIAL_SECONDS = 120


def _try_out(content: bytes) -> None:
    """Reads and uses a tokenizer of somebody else in another process, once: its library may abort the process that
    does, or never end. Raises ValueError."""
    passed = cache_dir.cache_folder() / "tokenizers" / xxhash.xxh3_128_hexdigest(content)
    if passed.exists():
        return
    command = [sys.executable, "-I", "-c", _TRIAL, *sys.path]
    try:
        done = subprocess.run(command, input=content, capture_output=True, timeout=_TRIAL_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"reading it takes longer than {_TRIAL_SECONDS} seconds") from None
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ValueError(reason.partition(": ")[2] or f"its library ended with exit code {done.returncode}")
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.touch()


def prefix_note(tokenizer: Tokenizer) -> str:
    """What the exported files tell other programs to put before a text, beside what training put there."""
    token = printable(text_of(tokenizer, [tokenizer.boundary]))
    if tokenizer.adds_boundary:
        return f"Its tokenizer puts {token!r} before a text that is no chat."
    return f"Its tokenizer puts nothing before a text; training on plain text puts {token!r} there."


def text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids`, or the name of a token that has none: a special one's."""
    return tokenizer.decode(ids) or next((text for text, token in tokenizer.table().items() if [token] == [*ids]), "")


def trained(spec: str, cache: Path) -> Path:
    """The file in `cache` that keeps the tokenizer `bpe:SIZE`. Raises UserError for a size that cannot be."""
    size = spec.removeprefix("bpe:")
    if not re.fullmatch(r"[0-9]{1,9}", size) or not 257 <= int(size) <= 2**24:
        raise UserError(
            f"data.tokenizer = {spec!r}: the size must be a whole number from 257 (256 bytes and the boundary) up.",
            do='tokenizer = "bpe:8192"',
        )
    return cache / f"bpe-{int(size)}.json"


class ByteTokenizer(Tokenizer):
    """256 ids, one per byte. Id 0 is the boundary: text with a NUL byte counts as binary and never gets here.

    Its files say it as a byte-level BPE without merges whose ids are the bytes; NUL is special.
    """

    name = "bytes"
    vocabulary = 256
    boundary = 0
    document_end: tuple[int, ...] = ()
    adds_boundary = True
    fingerprint = "bytes-1"
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def __init__(self) -> None:
        self.byte_lengths = np.ones(256, np.int32)
        self.byte_lengths[0] = 0
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        token = {"id": 0, "content": "\0", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        described = {
            "version": "1.0",
            "added_tokens": [token | flags],
            "pre_tokenizer": level,
            "decoder": level,
            "post_processor": prefix_processor("\0", self.boundary),
            "model": {"type": "BPE", "vocab": self.table(), "merges": []},
        }
        self.files = _own_files(msgspec.json.encode(described), "\0")

    def encode(self, text: bytes) -> Ids:
        """The bytes themselves, uint8, without a copy (read-only)."""
        return np.frombuffer(text, np.uint8)

    def encode_marked(self, texts: Sequence[str]) -> list[MarkedIds]:
        """There are no special tokens: each byte is one id of its character."""
        encoded = []
        for text in texts:
            sizes = [len(letter.encode()) for letter in text]
            letters = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
            encoded.append((self.encode(text.encode()), np.stack([letters, letters + 1], 1)))
        return encoded

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, boundaries and what is no byte left out, broken characters replaced."""
        return bytes(int(token) for token in ids if 0 < token < self.vocabulary).decode("utf-8", "replace")

    def table(self) -> dict[str, int]:
        letters = _alphabet()
        return {"\0": 0} | {letters[byte]: byte for byte in range(1, 256)}


class HfTokenizer(Tokenizer):
    """A `tokenizers.Tokenizer`. A boundary token is added when the file has none.

    The boundary is what `files` tell other programs to put before a text, else the stated end of text. `files` None:
    the tokenizer was made here.
    """

    def __init__(self, inner: Any, name: str, files: TokenizerFiles | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not a boundary
        stated = files or TokenizerFiles({})
        _add_stated(inner, stated)
        begin, end = _added_around(inner, stated)
        size = inner.get_vocab_size()
        boundary = _boundary(inner, stated, begin)
        inner.post_processor = None  # what it adds to texts is not how they are encoded
        self._inner = inner
        self.name = name
        ids = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(ids.values()) + 1
        if self.vocabulary > max(SPARSEST, 64 * len(ids)):
            raise UserError(
                f"data.tokenizer = {printable(name)!r} has the id {self.vocabulary - 1}, and {len(ids)} tokens.",
                why="a table has a row for each id up to it",
                do="download the tokenizer again",
            )
        self.boundary = int(ids[boundary])
        self.document_end: tuple[int, ...] = (end,) if begin is not None and end not in (None, self.boundary) else ()
        self.dtype: np.dtype[Any] = np.min_scalar_type(self.vocabulary - 1)
        plain = msgspec.json.decode(inner.to_str()) | {"post_processor": None}
        self.byte_lengths = _byte_lengths(plain, ids, self.vocabulary)
        around = [self.boundary, *self.document_end]
        self.byte_lengths[around] = 0
        self.fingerprint = xxhash.xxh3_128_hexdigest(msgspec.json.encode([plain, around]))
        self.adds_boundary = files is None or begin is not None
        if files is None:
            table = plain | {"post_processor": prefix_processor(boundary, self.boundary)}
            self.files = _own_files(formatted(table), boundary)
            return
        contents = dict(files.contents)
        if inner.get_vocab_size() > size:  # a boundary was added
            given = msgspec.json.decode(decoded(contents[TOKENIZER], TOKENIZER))
            contents[TOKENIZER] = formatted({**given, "added_tokens": plain["added_tokens"]})
        named = files.special_tokens
        if CONFIG not in contents:
            last = boundary if end is None else inner.id_to_token(end)
            named = {"eos_token": last, **({} if begin is None else {"bos_token": boundary}), **named}
            contents[CONFIG] = _config(named)
        self.files = replace(files, contents=contents, special_tokens=named)

    def encode(self, text: bytes) -> Ids:
        """Ids of UTF-8 `text`, [tokens]."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[Ids]:
        """`encode` of each text, on all cores."""
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece.decode() for parts in pieces for piece in parts]
        with _reading(self.name, "cannot encode a text"):
            encoded = iter(self._inner.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.zeros(0, self.dtype), *(np.array(next(encoded).ids, self.dtype) for _ in parts)])
            for parts in pieces
        ]

    def encode_marked(self, texts: Sequence[str]) -> list[MarkedIds]:
        self._inner.encode_special_tokens = False
        try:
            with _reading(self.name, "cannot encode a text"):
                encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [
            (np.array(text.ids, self.dtype), np.array(text.offsets, np.int64).reshape(len(text.ids), 2))
            for text in encoded
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        with _reading(self.name, "cannot decode tokens"):
            return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=True))

    def table(self) -> dict[str, int]:
        """With added tokens."""
        return dict(self._inner.get_vocab(with_added_tokens=True))


def _open_bpe(spec: str, corpus: Corpus | None, cache: Path | None) -> Tokenizer:
    trained_file = trained(spec, cache or Path())
    if cache and trained_file.is_file():
        with _reading(trained_file):
            return HfTokenizer(_library().Tokenizer.from_file(str(trained_file)), spec)
    if corpus is None:
        raise UserError(
            f"data.tokenizer = {spec!r} is trained on the corpus, and there is none here.",
            do="name the tokenizer.json written when it was trained",
        )
    inner = _train(int(spec.removeprefix("bpe:")), corpus())
    if cache:
        trained_file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(trained_file, inner.to_str().encode())
    return HfTokenizer(inner, spec)


def _train(size: int, texts: Iterable[str]) -> Any:
    """A BPE of `size` tokens, by the first `SAMPLE` characters."""
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(_alphabet()),
        show_progress=False,
    )

    def sample() -> Iterator[str]:
        left = SAMPLE
        for text in texts:
            yield text[:left]
            left -= len(text)
            if left <= 0:
                return

    inner.train_from_iterator(sample(), trainer)
    return inner


@contextmanager
def _reading(path: str | Path, fault: str = "is not a tokenizer.json") -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except BaseException as error:  # tokenizers raises bare Exception, and its panics are no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise
        raise UserError(
            f"data.tokenizer = {printable(path)!r} {fault}.",
            why=printable(error),
            do="save it again with the library it came from, or use tokenizer = 'bytes'",
        ) from None


def _library() -> Any:
    import tokenizers

    return tokenizers


def _add_stated(inner: Any, files: TokenizerFiles) -> None:
    """Makes stated special tokens that are plain entries of the vocabulary special, as transformers does."""
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    for role, text in files.special_tokens.items():
        if text not in added and inner.token_to_id(text) is not None:
            token = files.stated[role]
            given = {name: token[name] for name in flags if name in token} if isinstance(token, dict) else {}
            inner.add_special_tokens([_library().AddedToken(text, special=True, **given)])


def _added_around(inner: Any, files: TokenizerFiles) -> tuple[int | None, int | None]:
    """The id that other programs put before a text, and the stated end of text; None: none."""
    named = files.special_tokens
    bos, eos = (inner.token_to_id(named[role]) if role in named else None for role in ("bos_token", "eos_token"))
    if files.adds is not None:
        return (bos if files.adds[0] else None), eos
    encoded = inner.encode("a")
    before = next((at for at, mask in enumerate(encoded.special_tokens_mask) if not mask), 0)
    if eos is None and before:
        eos = next((number for text in _ENDS if (number := inner.token_to_id(text)) is not None), None)
    return (encoded.ids[0] if before else None), eos


def _boundary(inner: Any, files: TokenizerFiles, begin: int | None) -> str:
    """The text of the boundary, which is added where there is none."""
    if begin is not None:
        return str(inner.id_to_token(begin))
    named = files.special_tokens
    for text in (named.get("eos_token"), named.get("bos_token"), *_BOUNDARIES, named.get("pad_token")):
        if text and inner.token_to_id(text) is not None:
            return text
    inner.add_special_tokens([END_OF_TEXT])
    return END_OF_TEXT


def _own_files(content: bytes, boundary: str) -> TokenizerFiles:
    """The files of a tokenizer that was made here, whose texts begin with `boundary`."""
    roles = dict.fromkeys(("bos_token", "eos_token"), boundary)
    return TokenizerFiles({TOKENIZER: content, CONFIG: _config(roles)}, roles, roles)


def _byte_lengths(content: JsonObject, table: dict[str, int], vocabulary: int) -> NDArray[np.int32]:
    """Of a tokenizer whose `tokenizer.json` has this `content`."""
    added = {token["content"] for token in content["added_tokens"]}
    byte_level = b'"ByteLevel"' in msgspec.json.encode(content.get("decoder"))
    letters = set(_alphabet())
    lengths = np.zeros(vocabulary, np.int32)
    for text, token in table.items():
        if byte_level and text not in added and letters.issuperset(text):
            lengths[token] = len(text)
        elif re.fullmatch(r"<0x[0-9A-F]{2}>", text):  # SentencePiece's byte fallback
            lengths[token] = 1
        else:
            lengths[token] = len(text.replace("▁", " ").encode())
    return lengths


def _alphabet() -> list[str]:
    """GPT-2's printable character for each byte: itself where printable, else the next from U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _pieces(text: bytes) -> Iterator[bytes]:
    start = 0
    while len(text) - start > PIECE:
        end = text.rfind(b"\n", start, start + PIECE) + 1 or start + PIECE
        while text[end] & 0xC0 == 0x80:  # not inside a character
            end -= 1
        yield text[start:end]
        start = end
    yield text[start:]


def prefix_processor(boundary: str, number: int) -> dict[str, Any]:
    """The post-processor of a `tokenizer.json` that puts the boundary before every text."""
    special = {"SpecialToken": {"id": boundary, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {boundary: {"id": boundary, "ids": [number], "tokens": [boundary]}}
    pair = [special, first, special, second]
    return {"type": "TemplateProcessing", "single": [special, first], "pair": pair, "special_tokens": tokens}


def _config(roles: Mapping[str, str]) -> bytes:
    return formatted({"tokenizer_class": "PreTrainedTokenizerFast", **roles, "clean_up_tokenization_spaces": False})
