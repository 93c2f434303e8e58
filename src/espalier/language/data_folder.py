"""Data folders of Hugging Face and LLaMA-Factory: which of their files are one split of the data.

Splits are named in the `configs` of README.md, else by the names of files and folders (train, validation, test), as
`datasets` finds them. `dataset_info.json` of LLaMA-Factory names files, and what their columns and roles are called.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from espalier.language.row_files import ENDINGS, SourceFile, ending_of
from espalier.recipe.errors import UserError, missing_extra, nearest
from espalier.recipe.foreign_files import JsonObject, parsing, printable, read_table, read_text, unused
from espalier.recipe.units import plural

README = "README.md"
INFO = "dataset_info.json"
_ABOUT = re.compile(r"(readme(\.\w+)?|licen[cs]e.*|citation.*|notice.*|dataset_(infos?|dict)\.json)", re.IGNORECASE)
"""Names of files that are about the data, and none of it."""
_SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "dev", "val"),
}
_SPLIT_OF = {word: split for split, words in _SPLITS.items() for word in words}
_WORD = re.compile(r"[^-._ 0-9/]+")
_FRONT = re.compile(r"\A---\s*\n(.*?)^---\s*$", re.DOTALL | re.MULTILINE)

_TABLE_KEYS = frozenset({"file_name", "formatting", "ranking", "columns", "tags"})
Tables = Mapping[str, JsonObject]
"""By name of a file, its entry in LLaMA-Factory's `dataset_info.json`."""


class Selection(NamedTuple):
    """The files of a folder that are read, sentences on the others, and the tables of those that have one."""

    entries: tuple[SourceFile, ...]
    notes: tuple[str, ...] = ()
    tables: Tables = {}  # noqa: RUF012


def select(root: Path, entries: Sequence[SourceFile], split: str) -> Selection:
    """The files of `split` in a folder of data; all of them in a folder of anything else.

    Raises UserError for a split that the folder does not have, and for a README.md or dataset_info.json that is broken.
    """
    names = {entry.name for entry in entries}
    tables = tables_of(root) if INFO in names else {}
    if tables:
        return _tabled(entries, tables)
    configs = _configs(root) if README in names else []
    saved = any(ending_of(name) == ".arrow" for name in names)  # a folder of `datasets.save_to_disk`
    used = {README} if configs else set()
    bases = {name: name.rpartition("/")[2] for name in sorted(names)}
    about = [name for name, base in bases.items() if _ABOUT.fullmatch(base) or (saved and base == "state.json")]
    data = [entry for entry in entries if ending_of(entry.name) in ENDINGS and entry.name not in about]
    if not data or (not configs and len(data) + len(about) < len(entries)):
        return Selection(tuple(entries))
    by_name = _configured(root, configs) if configs else {entry.name: split_of(entry.name) for entry in data}
    splits = Counter(by_name.values())
    if split not in splits and len(splits) > 0:
        near = nearest(split, list(splits)) or next(iter(splits))
        raise UserError(
            f"data.split = {split!r}: {printable(root)} has no such split.",
            why=f"its files are of {', '.join(sorted(splits))}",
            do=f"data.split = {near!r}",
        )
    chosen = tuple(entry for entry in entries if by_name.get(entry.name) == split)
    if not chosen:
        raise UserError(
            f"{printable(root / README)} names data files that are not there.",
            do="download the folder again, or name the data files by a glob",
        )
    others = [unused("split", name, plural(count, "file")) for name, count in splits.items() if name != split]
    rest = [*about, *(entry.name for entry in entries if entry.name not in by_name and entry.name not in about)]
    return Selection(chosen, (*others, *(unused("file", name) for name in rest if name not in used)))


def split_of(name: str) -> str:
    """The split that a file's name, or that of its folder, stands for; `train` where none is named."""
    words = (word for word in reversed(_WORD.findall(name.lower())) if word in _SPLIT_OF)
    return _SPLIT_OF[next(words, "train")]


# --- README.md of Hugging Face -----------------------------------------------------------------------------------


def _configs(root: Path) -> list[JsonObject]:
    """The `configs` in the front matter of README.md."""
    front = _FRONT.match(read_text(root / README))
    if front is None or "configs:" not in front[1]:
        return []
    try:
        import yaml
    except ImportError:
        raise missing_extra("pyyaml", "graph", f"{root / README}") from None
    with parsing(root / README, "repair its first lines, or name the data files by a glob"):
        table = yaml.safe_load(front[1])
    configs = table.get("configs") if isinstance(table, dict) else None
    rows = configs if isinstance(configs, list) else []
    return [row for row in rows if isinstance(row, dict) and (row.get("data_files") or row.get("data_dir"))]


def _configured(root: Path, configs: Sequence[JsonObject]) -> dict[str, str]:
    """The split of each file that the chosen configuration names."""
    config = _default(root, configs)
    splits: dict[str, str] = {}
    with parsing(root / README, "repair its configs, or name the data files by a glob"):
        for part in _data_files(config.get("data_files")):
            for pattern in part["path"] if isinstance(part["path"], list) else [part["path"]]:
                for file in (root / config.get("data_dir", "")).glob(str(pattern)):
                    name = file.relative_to(root).as_posix()
                    splits.setdefault(name, str(part.get("split") or split_of(name)))
    return splits


def _data_files(stated: Any) -> list[JsonObject]:
    if isinstance(stated, list) and all(isinstance(part, dict) for part in stated):
        return stated
    if isinstance(stated, dict):
        return [{"split": split, "path": path} for split, path in stated.items()]
    return [{"split": "train", "path": stated} if stated else {"path": "**/*"}]


def _default(root: Path, configs: Sequence[JsonObject]) -> JsonObject:
    marked = [config for config in configs if config.get("default") is True]
    named = [config for config in configs if config.get("config_name") == "default"]
    if len(configs) > 1 and not marked and not named:
        raise UserError(
            f"{printable(root / README)} names {len(configs)} configurations of the data.",
            why=", ".join(printable(config.get("config_name")) for config in configs[:8]),
            do="name the files of one by a glob as data.path",
        )
    return [*marked, *named, *configs][0]


# --- dataset_info.json of LLaMA-Factory --------------------------------------------------------------------------


def tables_of(root: Path) -> dict[str, JsonObject]:
    """What `dataset_info.json` in a folder says of the files there, by their names. Raises UserError."""
    file = root / INFO
    if not file.is_file():
        return {}
    rows = read_table(file, "repair it, or take it out of the folder").values()
    return {row["file_name"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("file_name"), str)}


def _tabled(entries: Sequence[SourceFile], tables: Tables) -> Selection:
    chosen = {name: table for entry in entries for name, table in tables.items() if _within(entry.name, name)}
    by_file: dict[str, JsonObject] = {}
    for entry in entries:
        for name in (name for name in chosen if _within(entry.name, name)):
            by_file.setdefault(entry.name, chosen[name])
    if not by_file:
        return Selection(tuple(entries))
    files = tuple(entry for entry in entries if entry.name in by_file)
    rest = [unused("file", entry.name) for entry in entries if entry.name not in by_file and entry.name != INFO]
    return Selection(files, (*unused_keys(chosen), *rest), by_file)


def unused_keys(tables: Tables) -> Iterator[str]:
    """Keys of LLaMA-Factory's table that say more than what columns and roles are called, `num_samples` and such."""
    for name, table in tables.items():
        keys = (key for key in table if key not in _TABLE_KEYS)
        yield from (unused("key", key, f"{INFO} of {printable(name)}: {printable(table[key], 40)}") for key in keys)


def _within(name: str, stated: str) -> bool:
    """Whether a file is the stated one, or lies in the stated folder."""
    return name == stated or name.startswith(stated.rstrip("/") + "/")
