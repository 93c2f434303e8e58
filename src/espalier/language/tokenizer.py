"""How text becomes numbers: plain bytes, a Hugging Face `tokenizer.json`, or a byte-level BPE trained on the corpus.

Byte-level BPE after Sennrich et al. (1508.07909) and GPT-2's alphabet of 256 printable characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from espalier.cache_dir import write_atomic
from espalier.errors import UserError, missing_extra, nearest

Ids = NDArray[np.unsignedinteger[Any]]
Corpus = Callable[[], Iterable[str]]

SAMPLE = 32 << 20
"""Characters of the corpus a BPE is trained on, at most (31 M take 6 s on 2 cores)."""

PIECE = 1 << 20
"""Bytes encoded at once. A longer document is cut at line ends, which bounds memory."""

END_OF_TEXT = "<|endoftext|>"
_BOUNDARIES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|begin_of_text|>", "<s>", "<bos>", "\0")


class Tokenizer(Protocol):
    """Text to token ids and back. Ids are below `vocabulary`; `boundary` stands before every document."""

    name: str
    vocabulary: int
    boundary: int
    byte_lengths: NDArray[np.int32]
    """Bytes of text each id stands for, [vocabulary]; 0 for the boundary. Over a document they sum to its size exactly
    for bytes and byte-level BPE; for other tokenizers (normalised text, word-start marks) nearly."""
    fingerprint: str
    """Equal for tokenizers that encode alike, on every machine."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type that holds every id: uint8, uint16 or uint32."""
        ...

    def encode(self, text: bytes) -> Ids:
        """Ids of UTF-8 `text`, [tokens], of `dtype`; no boundary is added."""
        ...

    def encode_many(self, texts: Sequence[bytes]) -> list[Ids]:
        """`encode` of each text, on all cores where the tokenizer can."""
        ...

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Ids, NDArray[np.int64]]]:
        """Ids of texts in which names of special tokens mean these tokens, and the characters `[start, stop)` that each
        id stands for, [tokens, 2]."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, boundaries left out, broken characters replaced by U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json` as Hugging Face reads them."""
        ...

    def table(self) -> dict[str, int]:
        """The id of each token, in the letters of `tokenizer.json`."""
        ...


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
        return HfTokenizer(_load(path), spec, path)
    near = nearest(spec, ["bytes", "bpe:8192"])
    hint = f"did you mean {near}? " if near else ""
    raise UserError(
        f"data.tokenizer = {spec!r} is neither a tokenizer nor a file.",
        do=hint + "known: bytes, bpe:SIZE (such as bpe:8192), a path to a tokenizer.json",
    )


def kept_tokenizer(spec: str, folder: Path) -> Tokenizer:
    """The tokenizer that `spec` named when `save` wrote it into `folder`, whatever `spec` names now."""
    path = folder / "tokenizer.json"
    return ByteTokenizer() if spec in ("bytes", "auto") else HfTokenizer(_load(path), spec, path)


def trained(spec: str, cache: Path) -> Path:
    """The file in `cache` that keeps the tokenizer `bpe:SIZE`. Raises UserError for a size that cannot be."""
    size = spec.removeprefix("bpe:")
    if not re.fullmatch(r"[0-9]{1,9}", size) or not 257 <= int(size) <= 2**24:
        raise UserError(
            f"data.tokenizer = {spec!r}: the size must be a whole number from 257 (256 bytes and the boundary) up.",
            do='tokenizer = "bpe:8192"',
        )
    return cache / f"bpe-{int(size)}.json"


class ByteTokenizer:
    """256 ids, one per byte. Id 0 is the boundary: text with a NUL byte counts as binary and never gets here."""

    name = "bytes"
    vocabulary = 256
    boundary = 0
    fingerprint = "bytes-1"
    dtype: np.dtype[Any] = np.dtype(np.uint8)

    def __init__(self) -> None:
        self.byte_lengths = np.ones(256, np.int32)
        self.byte_lengths[0] = 0

    def encode(self, text: bytes) -> Ids:
        """The bytes themselves, uint8, without a copy (read-only)."""
        return np.frombuffer(text, np.uint8)

    def encode_many(self, texts: Sequence[bytes]) -> list[Ids]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Ids, NDArray[np.int64]]]:
        """There are no special tokens: each byte is one id of its character."""
        found = []
        for text in texts:
            sizes = [len(letter.encode()) for letter in text]
            letters = np.repeat(np.arange(len(text), dtype=np.int64), sizes)
            found.append((self.encode(text.encode()), np.stack([letters, letters + 1], 1)))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, boundaries and what is no byte left out, broken characters replaced."""
        return bytes(int(token) for token in ids if 0 < token < self.vocabulary).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Writes a byte-level BPE without merges whose ids are the bytes; its special token is NUL, id 0."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        token = {"id": 0, "content": "\0", "special": True}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        table = {
            "version": "1.0",
            "added_tokens": [token | flags],
            "pre_tokenizer": level,
            "decoder": level,
            "post_processor": _begun("\0", self.boundary),
            "model": {"type": "BPE", "vocab": self.table(), "merges": []},
        }
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "tokenizer.json", msgspec.json.encode(table))
        write_atomic(folder / "tokenizer_config.json", _config("\0"))

    def table(self) -> dict[str, int]:
        """See `save`."""
        letters = _alphabet()
        return {"\0": 0} | {letters[byte]: byte for byte in range(1, 256)}


class HfTokenizer:
    """A `tokenizers.Tokenizer`. A boundary token is added when the file has none."""

    def __init__(self, inner: Any, name: str, path: Path | None = None) -> None:
        inner.no_truncation()
        inner.no_padding()
        inner.encode_special_tokens = True  # "<|endoftext|>" written in a text is text, not a boundary
        inner.post_processor = None  # what it adds to texts is not how they are encoded
        self._text = _boundary(inner, path)
        self._inner, self._path, self.name = inner, path, name
        self.folder = path.parent if path else None
        """Where its file lies, beside which a chat template may stand."""
        table = inner.get_vocab(with_added_tokens=True)
        self.vocabulary = max(table.values()) + 1
        self.boundary = int(table[self._text])
        self.dtype: np.dtype[Any] = np.min_scalar_type(self.vocabulary - 1)
        self.byte_lengths = _byte_lengths(inner, table, self.vocabulary)
        self.byte_lengths[self.boundary] = 0
        # What puts the boundary first is added when it is saved, and is not asked when text is encoded here.
        plain = msgspec.json.decode(inner.to_str()) | {"post_processor": None}
        self.fingerprint = xxhash.xxh3_128_hexdigest(msgspec.json.encode(plain))

    def encode(self, text: bytes) -> Ids:
        """Ids of UTF-8 `text`, [tokens]."""
        return self.encode_many([text])[0]

    def encode_many(self, texts: Sequence[bytes]) -> list[Ids]:
        """`encode` of each text, on all cores."""
        pieces = [list(_pieces(text)) for text in texts]
        flat = [piece.decode() for parts in pieces for piece in parts]
        encoded = iter(self._inner.encode_batch_fast(flat, add_special_tokens=False))
        return [
            np.concatenate([np.zeros(0, self.dtype), *(np.array(next(encoded).ids, self.dtype) for _ in parts)])
            for parts in pieces
        ]

    def encode_marked(self, texts: Sequence[str]) -> list[tuple[Ids, NDArray[np.int64]]]:
        """See `Tokenizer.encode_marked`."""
        self._inner.encode_special_tokens = False
        try:
            encoded = self._inner.encode_batch(list(texts), add_special_tokens=False)
        finally:
            self._inner.encode_special_tokens = True
        return [
            (np.array(one.ids, self.dtype), np.array(one.offsets, np.int64).reshape(len(one.ids), 2)) for one in encoded
        ]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, special tokens left out."""
        return str(self._inner.decode([int(token) for token in ids], skip_special_tokens=True))

    def table(self) -> dict[str, int]:
        """With added tokens."""
        return dict(self._inner.get_vocab(with_added_tokens=True))

    def save(self, folder: Path) -> None:
        """Writes `tokenizer.json` and `tokenizer_config.json`, with what the one beside the original says of other
        things. The boundary stands before every text, as it did in training."""
        folder.mkdir(parents=True, exist_ok=True)
        table = msgspec.json.decode(self._inner.to_str()) | {"post_processor": _begun(self._text, self.boundary)}
        write_atomic(folder / "tokenizer.json", msgspec.json.format(msgspec.json.encode(table), indent=2))
        beside = self._path.with_name("tokenizer_config.json") if self._path else None
        stated = msgspec.json.decode(beside.read_bytes()) if beside and beside.is_file() else {}
        kept = {key: value for key, value in stated.items() if key not in ("add_bos_token", "add_eos_token")}
        write_atomic(folder / "tokenizer_config.json", _config(self._text, kept))


def _open_bpe(spec: str, corpus: Corpus | None, cache: Path | None) -> Tokenizer:
    kept = trained(spec, cache or Path())
    if cache and kept.is_file():
        return HfTokenizer(_load(kept), spec)
    if corpus is None:
        raise UserError(
            f"data.tokenizer = {spec!r} is trained on the corpus, and there is none here.",
            do="name the tokenizer.json written when it was trained",
        )
    inner = _train(int(spec.removeprefix("bpe:")), corpus())
    if cache:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(kept, inner.to_str().encode())
    return HfTokenizer(inner, spec)


def _train(size: int, texts: Iterable[str]) -> Any:
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
    inner.train_from_iterator(_capped(texts), trainer)
    return inner


def _capped(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _load(path: Path) -> Any:
    library = _library()
    try:
        return library.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(
            f"data.tokenizer = {str(path)!r} is not a tokenizer.json.",
            why=str(error),
            do="save it again with the library it came from, or use tokenizer = 'bytes'",
        ) from None


def _library() -> Any:
    try:
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers, trainers  # noqa: F401
    except ImportError:
        raise missing_extra("tokenizers", "llm", "data.tokenizer other than 'bytes'") from None
    return tokenizers


def _boundary(inner: Any, path: Path | None) -> str:
    beside = path.with_name("tokenizer_config.json") if path else None
    stated: list[str | None] = []
    if beside and beside.is_file():
        table = msgspec.json.decode(beside.read_bytes())
        for key in ("eos_token", "bos_token"):
            value = table.get(key)
            stated.append(value.get("content") if isinstance(value, dict) else value)
    for text in (*stated, *_BOUNDARIES):
        if text and inner.token_to_id(text) is not None:
            return text
    inner.add_special_tokens([END_OF_TEXT])
    return END_OF_TEXT


def _byte_lengths(inner: Any, table: dict[str, int], vocabulary: int) -> NDArray[np.int32]:
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    byte_level = '"ByteLevel"' in msgspec.json.encode(msgspec.json.decode(inner.to_str()).get("decoder")).decode()
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


def _begun(boundary: str, number: int) -> dict[str, Any]:
    """The post-processor of a `tokenizer.json` that puts the boundary before every text."""
    special = {"SpecialToken": {"id": boundary, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    tokens = {boundary: {"id": boundary, "ids": [number], "tokens": [boundary]}}
    pair = [special, first, special, second]
    return {"type": "TemplateProcessing", "single": [special, first], "pair": pair, "special_tokens": tokens}


def _config(boundary: str, others: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    table = {
        **others,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": boundary,
        "eos_token": boundary,
        "clean_up_tokenization_spaces": False,
    }
    return msgspec.json.format(msgspec.json.encode(table), indent=2)
