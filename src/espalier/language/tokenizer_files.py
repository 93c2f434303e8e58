"""The files of a Hugging Face tokenizer: special tokens, chat template and post-processor, kept byte for byte.

A run keeps them in its folder and every export writes them, so training, a resumed run, `predict` and the programs that
load an export read the same special tokens. A stated token is one that `tokenizer_config.json` names, or, where that
is silent, `special_tokens_map.json` or transformers' default of the tokenizer's class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from espalier.recipe.cache_dir import write_atomic
from espalier.recipe.data_table import data_table
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, decoded, parsing, printable, read_table

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
GENERATION = "generation_config.json"
MODEL = "config.json"
MODEL_IDS = "special_token_ids.json"
"""Of a run: the ids that the `config.json` beside the tokenizer states."""
EOS = "eos_token_id"
ID_KEYS = ("bos_token_id", EOS, "pad_token_id")
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_MAP = "special_tokens_map.json"
_OTHERS = (_MAP, "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")
_MORE_TEMPLATES = "additional_chat_templates"
_AGAIN = "download the tokenizer again"
_DEFAULTS: Mapping[str, Mapping[str, str]] = data_table(__file__)
"""Special tokens of transformers' classes, for those that no file states."""


@dataclass(frozen=True)
class TokenizerFiles:
    """Files of a tokenizer, and what they state.

    Attributes:
        contents: file name to content; all of them are exported.
        special_tokens: role (`bos_token`, …) to text, for the roles that are stated.
        stated: those of them that a file states with flags, as that file does.
        template: the chat template; None: there is none.
        adds: (begin, end) whether `tokenizer_config.json` says that bos and eos are added; None: it does not say.
        model_ids: what the model's `config.json` says of `ID_KEYS`; None: nothing.
        generation: the model's `generation_config.json`.
        ends: ids at which programs end a text, as it says.
        origin: where the template is from, for messages.
    """

    contents: Mapping[str, bytes]
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    stated: JsonObject = field(default_factory=dict)
    template: str | None = None
    adds: tuple[bool, bool] | None = None
    model_ids: JsonObject | None = None
    generation: bytes | None = None
    ends: tuple[int, ...] = ()
    origin: str = ""

    def write(self, folder: Path) -> None:
        """Writes the files into `folder`, which is made."""
        for name, content in self.contents.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / name, content)

    def keep(self, folder: Path) -> None:
        """Writes what `read` needs to give the same again."""
        self.write(folder)
        if self.generation is not None:
            write_atomic(folder / GENERATION, self.generation)
        if self.model_ids is not None:
            write_atomic(folder / MODEL_IDS, msgspec.json.encode(self.model_ids))

    def without_prefix(self) -> TokenizerFiles:
        """The same files, which tell other programs to put nothing before or after a text."""
        tables = {
            name: msgspec.json.decode(decoded(self.contents.get(name, b"{}"), name)) for name in (TOKENIZER, CONFIG)
        }
        tables[TOKENIZER]["post_processor"] = None
        tables[CONFIG] |= {"add_bos_token": False, "add_eos_token": False}
        contents = {**self.contents, **{name: formatted(table) for name, table in tables.items()}}
        return replace(self, contents=contents, adds=(False, False))

    def with_end(self, number: int, ids: JsonObject) -> TokenizerFiles:
        """The same files, whose `generation_config.json` also ends texts at the token `number`; unchanged where it
        does. `ids`: what `config.json` says of `ID_KEYS`, which holds where there is no such file."""
        if number in self.ends:
            return self
        table = ids if self.generation is None else msgspec.json.decode(decoded(self.generation, GENERATION))
        ends = tuple(dict.fromkeys([*(self.ends or listed(ids.get(EOS))), number]))
        return replace(self, generation=formatted({**table, EOS: ends}), ends=ends)

    def with_template(self, text: str) -> TokenizerFiles:
        """The same files with the chat template `text`; unchanged where it is theirs."""
        if text == self.template:
            return self
        contents = {**self.contents, TEMPLATE: text.encode()}
        config = msgspec.json.decode(decoded(contents.get(CONFIG, b"{}"), CONFIG))
        if config.pop("chat_template", None) is not None:
            contents[CONFIG] = formatted(config)
        return replace(self, contents=contents, template=text)


def formatted(table: JsonObject) -> bytes:
    """`table` as indented JSON."""
    return msgspec.json.format(msgspec.json.encode(table), indent=2)


def read(file: Path) -> TokenizerFiles:
    """The files of the tokenizer in `file` (a `tokenizer.json`) and what they state.

    Raises UserError for one that cannot be read or is no table.
    """
    folder = file.parent
    names = [CONFIG, TEMPLATE, *_OTHERS]
    more = sorted((folder / _MORE_TEMPLATES).glob("*.jinja"))
    with parsing(file, "name the tokenizer.json of a model"):
        contents = {TOKENIZER: file.read_bytes()}
        contents |= {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
        contents |= {f"{_MORE_TEMPLATES}/{template_file.name}": template_file.read_bytes() for template_file in more}
        generation = (folder / GENERATION).read_bytes() if (folder / GENERATION).is_file() else None
    config = _table(folder / CONFIG)
    special_map = {} if "added_tokens_decoder" in config else _table(folder / _MAP)
    stated = _stated(config, special_map)
    texts = {role: token.get("content") if isinstance(token, dict) else token for role, token in stated.items()}
    special_tokens = {role: text for role, text in texts.items() if isinstance(text, str) and text}
    strange = next((role for role in ROLES if role in stated and role not in special_tokens), None)
    if strange is not None:
        stating = folder / (_MAP if special_map.get(strange) else CONFIG)
        raise UserError(
            f"{printable(stating)} says {strange} = {printable(stated[strange])}, which is no token.",
            do=_AGAIN,
        )
    template, origin = _template(folder, contents, config)
    given = [config.get(name) for name in ("add_bos_token", "add_eos_token")]
    adds = None if given == [None, None] else (bool(given[0]), bool(given[1]))
    stored = next((name for name in (MODEL_IDS, MODEL) if (folder / name).is_file()), MODEL)
    ids = _ids_in(folder / stored) or None
    ends = tuple(listed(_ids_in(folder / GENERATION).get(EOS)))
    return TokenizerFiles(contents, special_tokens, stated, template, adds, ids, generation, ends, origin)


def _table(file: Path) -> dict[str, Any]:
    return read_table(file, _AGAIN) if file.is_file() else {}


def _stated(config: JsonObject, special_map: JsonObject) -> dict[str, Any]:
    """Role to the token as it is stated, a text or a table with `content`."""
    defaults = _DEFAULTS.get(str(config.get("tokenizer_class", "")).removesuffix("Fast"), {})
    every = {**defaults, **config, **special_map}
    stated = {role: every[role] for role in ROLES if every.get(role)}
    more = every.get("extra_special_tokens")
    return stated | (more if isinstance(more, dict) else {})


def _template(folder: Path, contents: Mapping[str, bytes], config: JsonObject) -> tuple[str | None, str]:
    """The chat template and its file. Of several by name it is the default."""
    if TEMPLATE in contents:
        return decoded(contents[TEMPLATE], folder / TEMPLATE), str(folder / TEMPLATE)
    template = config.get("chat_template")
    origin = str(folder / CONFIG)
    with parsing(folder / CONFIG, _AGAIN):
        if isinstance(template, list):
            template = {row["name"]: row["template"] for row in template}
        if isinstance(template, dict):
            name = "default" if "default" in template else next(iter(template), None)
            origin += "" if name == "default" else f" ({name!r})"
            template = template.get(name)
        if template is None:
            return None, ""
        if not isinstance(template, str):
            raise ValueError(f"its chat_template is {printable(template)}, and no text")
        template.encode()  # half of a surrogate pair is no text
    return template, origin


def _ids_in(file: Path) -> JsonObject:
    table = _table(file)
    with parsing(file, _AGAIN):
        return {key: msgspec.convert(table[key], int | list[int] | None) for key in ID_KEYS if key in table}


def listed(ids: int | list[int] | None) -> list[int]:
    """The ids of an entry of `ID_KEYS`."""
    return [ids] if isinstance(ids, int) else ids or []
