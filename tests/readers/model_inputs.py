"""Small good inputs of models, tokenizers, templates, captures and run folders, and how they are read."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
from gguf_files import PLAIN, TENSORS, gguf_of
from inputs import Reading, digest
from made import make
from PIL import Image

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
WORDS = ["a", "b", "c", "ab", "Ġ", "<|end|>"]
TOKENIZER = {
    "version": "1.0",
    "added_tokens": [{"id": 5, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False}],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": LEVEL,
    "decoder": LEVEL,
    "model": {"type": "BPE", "vocab": {word: number for number, word in enumerate(WORDS)}, "merges": [["a", "b"]]},
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] | upper ~ ': ' + m.content[:9] * 2 }}{% if loop.last %}{{ '%s' % m.role }}"
    "{% endif %}{% endfor %}{% set n = namespace(x=2 ** 3) %}{{ n.x }}{{ range(4) | join(',') }}"
)


def gguf(folder: Path) -> Path:
    return gguf_of(folder / "m.gguf", PLAIN, TENSORS)


def of_gguf(path: Path) -> Reading:
    """The whole way, without the cache."""
    from espalier.language import gguf_file, hf

    out = path.with_name("out")
    out.mkdir(exist_ok=True)
    gguf_file._convert(path, out)
    with mock.patch.object(gguf_file, "folder_of", return_value=out):
        return Reading(digest(hf.options(path)), ())


def tokenizer(folder: Path) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(table))
    (folder / "special_tokens_map.json").write_text('{"pad_token": {"content": "<|end|>"}}')
    return folder / "tokenizer.json"


def tokens(path: Path) -> Reading:
    from espalier.language import tokenizer as tokenizers

    with mock.patch.object(tokenizers, "_try_out"):  # another process for each would take too long
        words = tokenizers.open_tokenizer(str(path))
    ids = words.encode(b"abc a<|end|>")
    return Reading(digest(ids.tolist(), words.decode(ids.tolist()), words.token_ids()), ())


def template(folder: Path) -> Path:
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder / "chat_template.jinja"


def rendered(path: Path) -> Reading:
    from espalier.language.tokenizer import ByteTokenizer
    from espalier.language.tune.chat_template import open_template
    from espalier.language.tune.row_formats import Turn, Unusable

    turns = [Turn("user", "hi"), Turn("assistant", "yes")]
    try:
        return Reading(open_template(str(path), ByteTokenizer()).render(turns), ())
    except Unusable as reason:
        return Reading("", (str(reason),))


def llff(folder: Path) -> Path:
    (folder / "images").mkdir()
    rows = []
    for view in range(4):
        pose = np.array([[0, 1, 0, 0.3 * view - 0.5], [-1, 0, 0, 0.2 * (view % 2)], [0, 0, 1, 0]])
        rows.append([*np.concatenate([pose, [[6], [8], [9]]], 1).ravel(), 4.0, 10.0])
        Image.new("RGB", (8, 6), (view * 40, 90, 7)).save(folder / "images" / f"{view}.png")
    np.save(folder / "poses_bounds.npy", np.array(rows))
    return folder


def run(folder: Path) -> Path:
    make(folder / "run", 20, resumed=8)
    return folder / "run"


def report(path: Path) -> Reading:
    """Every view of a run: its page, its line in a table of runs, its recipe and its plan."""
    from espalier.evaluate.eval_history import EvalHistory
    from espalier.plan import base as plans
    from espalier.recipe.errors import UserError
    from espalier.track import report as reports
    from espalier.track import run_comparison, run_tables

    opened = run_tables.RunTables.read(path)
    repr(opened)
    EvalHistory(path / "events.jsonl")
    summary = run_comparison.summary(path)
    run_comparison.row(summary)
    page = reports.render(opened, live=True)
    try:
        plans.read(path / "plan.json")
    except UserError as refusal:
        return Reading(page, (str(refusal),))
    return Reading(page, ())
