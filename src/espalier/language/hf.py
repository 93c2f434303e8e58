"""Hugging Face weights in and out: folders of the families that `hf_config` knows.

The values are ours under other names, bit for bit; some families join matrices (`fused`) or have the columns of heads
in another order. An export is written beside its place, reloaded, compared, and only then moved there.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from espalier import recipe as config
from espalier.checkpoint import weight_files
from espalier.checkpoint.weight_files import StoredTensor
from espalier.language import gguf_file, hf_config
from espalier.language.gpt import GPT
from espalier.language.hf_config import CONFIG
from espalier.language.moe import MOE
from espalier.language.tokenizer_files import GENERATION, ID_KEYS, TokenizerFiles
from espalier.machine.resource_limits import refuse_large
from espalier.recipe import cache_dir
from espalier.recipe.data_table import data_table
from espalier.recipe.decoder_shapes import ROUTING, DecoderSizes, sizes
from espalier.recipe.errors import UserError
from espalier.recipe.foreign_files import JsonObject, parsing, printable, read_table, unused
from espalier.recipe.units import plural

FILE_BYTES = 5 * 10**9
"""Most bytes in one weights file, as `save_pretrained` splits them."""

HUB = "hf:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
INDEX = "model.safetensors.index.json"
_WEIGHTS = "model.safetensors"
_FOLDER = "give a folder with config.json and safetensors, or download it again"
_HEAD = "lm_head.weight"
_TABLE = "model.embed_tokens.weight"
_BUFFER = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|attn\.(bias|masked_bias))$")
"""Tensors that are computed, not trained."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_LAYER = re.compile(r"^blocks\.(\d+)\.")
_THEIR_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
DTYPES = ("F64", "F32", "F16", "BF16")
_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")

_NAMES = data_table(__file__)
"""Our names to theirs, those that kinds share and those of each kind."""


FUSED = _NAMES["fused"]
"""Of each kind its matrices that hold several of ours, and which these are."""


def _theirs(kind: str) -> dict[str, str]:
    return dict(_NAMES["shared"] | _NAMES.get(kind, {}))


class SavedTokenizer(Protocol):
    """What of a tokenizer an export needs. `Tokenizer` also says the ids for `config.json`."""

    def save(self, folder: Path) -> None:
        """Writes its files into `folder`."""


# --- out ---------------------------------------------------------------------------------------------------------


def export(model: GPT, tokenizer: SavedTokenizer, folder: str | Path) -> None:
    """Writes `model` as a folder that `transformers` loads, reloads it and compares every tensor bit for bit.

    An earlier export in `folder` is replaced. Raises UserError when the folder holds something else or cannot be
    written, and for mixtures that no family has.
    """
    if (why := hf_config.mixture_refusal(model.size)) is not None:
        raise UserError(
            "This mixture of experts has no Hugging Face folder.",
            why=why,
            do='a run with model.balancing = "loss" and without model.max_iterations'
            if model.size.bias or model.size.max_iterations
            else "model.family and model.shared of Mixtral or of Qwen",
        )
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    tensors = to_theirs(state, model.size)
    dtype = str(tensors["model.norm.weight"].dtype).removeprefix("torch.")
    token_ids = getattr(tokenizer, "token_ids", dict[str, Any])()
    files = getattr(tokenizer, "files", TokenizerFiles({}))
    table = config_of(model.size, token_ids, dtype)

    def fill(partial: Path) -> None:
        _write(partial, tensors, table)
        if files.generation is not None:
            (partial / GENERATION).write_bytes(files.generation)
        tokenizer.save(partial)
        weight_files.refuse_changed(_files(partial), tensors)

    cache_dir.export(Path(folder), CONFIG, fill)


def config_of(size: DecoderSizes, token_ids: JsonObject, dtype: str) -> JsonObject:
    """`hf_config.table_of`. Raises UserError naming the options that the family's `config.json` does not say."""
    table = hf_config.table_of(size, token_ids, dtype)
    require_same(options_of(size), hf_config.options(table, "it"), f"a {CONFIG} of {table['model_type']}")
    return table


def opened(folder: str | Path) -> Path:
    """`folder`; of a model on the Hugging Face hub (`hf:ORG/NAME`, `hf:ORG/NAME@REVISION`), that of its cache; of a
    GGUF file, the one that it was made into. Raises UserError."""
    path = Path(folder)
    if str(folder).startswith(HUB):
        return _downloaded(str(folder))
    if _HUB_NAME.fullmatch(str(folder)) and not path.exists():
        raise UserError(f"There is no folder {folder}.", do=f'"{HUB}{folder}", if the model of the hub is meant')
    return gguf_file.folder_of(path) if path.suffix == gguf_file.SUFFIX else path


@cache
def _downloaded(name: str) -> Path:
    """The folder of the hub's cache; the network is asked where files are missing there."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    last: Exception | None = None
    for offline in (True, False):
        try:
            folder = Path(
                snapshot_download(
                    repository,
                    revision=revision or None,
                    local_files_only=offline,
                    allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"],
                    ignore_patterns=["*/*", "consolidated*"],
                )
            )
            _files(folder)
            return folder
        except Exception as error:  # the library's errors have no common base
            last = error
    raise UserError(
        f"model.initial = {name!r} cannot be loaded.",
        why=f"{type(last).__name__}: {last}",
        do="hf:ORG/NAME of a model with safetensors (private ones after `hf auth login`), or download a folder",
    )


def copy(folder: Path, target: Path) -> None:
    """Copies what `load_into` reads of `folder` into the new folder `target`."""
    folder = opened(folder)
    target.mkdir()
    for file in (folder / CONFIG, *([folder / INDEX] if (folder / INDEX).exists() else []), *_files(folder)):
        shutil.copyfile(file, target / file.name)


def _write(folder: Path, tensors: Mapping[str, Tensor], table: JsonObject) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(dict(tensors), folder, max_shard_size=FILE_BYTES)
    write_json(folder / CONFIG, table)
    special = {key: table[key] for key in ID_KEYS if table.get(key) is not None}
    write_json(folder / GENERATION, {"_from_model_config": True, **special})


# --- in ----------------------------------------------------------------------------------------------------------


def load(folder: str | Path, dtype: torch.dtype, layers: int | None = None) -> tuple[config.Decoder, dict[str, Tensor]]:
    """The options that a folder of one of `hf_config.FAMILIES` stands for, and its weights under our names, as `dtype`.

    `layers`: of the first so many. Raises UserError naming the file, setting or tensor that this decoder cannot take
    over.
    """
    model = first_layers(options(folder), layers)
    state: dict[str, Tensor] = {}
    tensors = {
        name: place
        for name, place in _wanted(_stored(opened(folder)), model).items()
        if _layer_of(name) < (model.depth or 0)
    }
    refuse_large(f"{folder}", sum(math.prod(stored.shape) for stored in tensors.values()) * dtype.itemsize)
    for name, place in tensors.items():
        state |= to_ours(name, weight_files.value(name, place).to(dtype), sizes(model))
    return model, state


def first_layers(model: config.Decoder, layers: int | None) -> config.Decoder:
    """`model`, of at most `layers` layers."""
    return model if layers is None else model.changed(depth=min(layers, model.depth or layers))


def _layer_of(theirs: str) -> int:
    return int(match[1]) if (match := _THEIR_LAYER.match(theirs)) else -1


def load_into(model: GPT, folder: str | Path) -> None:
    """Fills `model` with the weights of `folder`, or of its first layers. Raises UserError naming every option that
    differs."""
    layers = model.size.layers
    require_same(options_of(model.size), first_layers(options(folder), layers), str(folder))
    state = load(folder, model.embedding.weight.dtype, layers)[1]
    model.load_state_dict(state)


def weights_of(model: GPT, folder: Path) -> Callable[[str], Tensor]:
    """Reads the weights of `folder` one by one, as fp32, by the names in `model`. Raises UserError as `load_into`."""
    size = model.size
    require_same(options_of(size), first_layers(options(folder), size.layers), str(folder))
    tensors = _stored(opened(folder))
    kind = hf_config.kind_of(size)

    def value(name: str) -> Tensor:
        theirs = _joined(name, kind) or renamed(name, kind)
        return to_ours(theirs, weight_files.value(theirs, tensors[theirs]), size)[name].float()

    return value


# --- joined matrices, and the order of columns -------------------------------------------------------------------


def to_theirs(state: Mapping[str, Tensor], size: DecoderSizes) -> dict[str, Tensor]:
    """Tensors by our names, of a model of `size`, as those of its kind."""
    kind = hf_config.kind_of(size)
    parts: dict[str, list[Tensor]] = {}
    for name, value in state.items():
        parts.setdefault(_joined(name, kind) or renamed(name, kind), []).append(_reordered(name, value, size, False))
    return {name: torch.cat(values) if len(values) > 1 else values[0] for name, values in parts.items()}


def to_ours(name: str, value: Tensor, size: DecoderSizes) -> dict[str, Tensor]:
    """What the tensor `name` of their kind is of a model of `size`, by our names."""
    kind = hf_config.kind_of(size)
    parts = FUSED.get(kind, {}).get(_pattern(name))
    if parts is None:
        named = {ours(name, kind): value}
    else:
        rows = {"query": size.query_width, "key": size.kv_width, "value": size.kv_width}
        place = "attention" if parts[0] in rows else "feed_forward"
        ends = [sum(rows.get(part, size.feed_forward) for part in parts[:count]) for count in range(1, len(parts))]
        pieces = value.tensor_split(ends)
        layer = _layer_of(name)
        named = {f"blocks.{layer}.{place}.{part}.weight": piece for part, piece in zip(parts, pieces, strict=True)}
    return {name: _reordered(name, value, size, True).contiguous() for name, value in named.items()}


def _joined(name: str, kind: str) -> str | None:
    """The matrix of theirs that holds our tensor `name` and others."""
    for pattern, parts in FUSED.get(kind, {}).items():
        if name.endswith(tuple(f".{part}.weight" for part in parts)):
            return str(pattern.format(name.split(".")[1]))
    return None


def _reordered(name: str, value: Tensor, size: DecoderSizes, into: bool) -> Tensor:
    """Queries and keys with the columns of each head in our order, or (not `into`) in theirs: the first half of those
    that turn begins the first half of a head, the second half the second."""
    pairs = size.family in _NAMES["pairs"]
    columns = size.rotary_columns
    turned = name.endswith((".query.weight", ".key.weight", ".query.bias", ".key.bias"))
    if not turned or not (pairs or columns < size.head_size) or value.shape[0] % size.head_size:
        return value
    places = torch.arange(size.head_size)
    turning = places[:columns].view(-1, 2).T if pairs else places[:columns].view(2, -1)
    order = torch.cat([turning, places[columns:].view(2, -1)], 1).flatten()
    heads = value.unflatten(0, (-1, size.head_size))
    return heads[:, order if into else order.argsort()].flatten(0, 1)


def _wanted(tensors: Mapping[str, StoredTensor], model: config.Decoder) -> dict[str, StoredTensor]:
    """Those that the model has. A head that is the table, and buffers that are computed, are none of it."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not _BUFFER.search(name) and not (name == _HEAD and model.tied)
    }


def require_same(wanted: config.Decoder, stored: config.Decoder, origin: str) -> None:
    """Raises UserError naming each option of `wanted` (open ones left out) that the weights in `origin` contradict.

    The context may differ: nothing in the weights depends on it.
    """
    free = {"shape", "initial", "layers", "context", "balance", "balancing", "z_loss"}
    names = [name for name in wanted.__struct_fields__ if name not in free and getattr(wanted, name) is not None]
    differing = [
        f"model.{name} = {getattr(wanted, name)}, but {getattr(stored, name)} there"
        for name in names
        if type(wanted) is type(stored) and getattr(wanted, name) != getattr(stored, name)
    ]
    if type(wanted) is not type(stored):
        differing = [f"one of the two has experts: {type(wanted).__name__} here, {type(stored).__name__} there"]
    if differing:
        do = "leave those options out of [model] or give the values there"
        if wanted.depth != stored.depth:
            do += '; model.layers = "first 12" takes the first 12 layers'
        raise UserError(f"The weights in {origin} do not fit the model.", why="; ".join(differing), do=do)


def options(folder: str | Path) -> config.Decoder:
    """The model options that the `config.json` in `folder` says, every one of them set; a head that differs from the
    table is one of its own, whatever `tie_word_embeddings` says.

    Raises UserError for an architecture that this decoder does not express, naming the first module that differs, and
    for weights that are others than the options say.
    """
    home = opened(folder)
    table = read_table(home / CONFIG, _FOLDER)
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in hf_config.FAMILIES:
        known = set(_theirs("llama").values())
        named = next((name for name in _stored(home) if _pattern(name) not in known), None)
        differs = f"{printable(named.rpartition('.')[0])} is no module of this decoder; " if named else ""
        raise UserError(
            f"{folder} holds a {printable(repr(kind))} model."
            if "model_type" in table
            else f"{home / CONFIG} has no model_type, but {printable(', '.join(table))}.",
            why=f"{differs}{', '.join(hf_config.FAMILIES)} can be loaded",
            do=hf_config.DOOR,
        )
    model = hf_config.options(table, str(folder))
    columns = model.head_size or (model.width or 1) // (model.heads or 1)
    refuse_large(
        f"A table of the positions that {folder}/{CONFIG} says (max_position_embeddings)",
        (model.context or 1) * columns * 16,
    )
    if not (home / INDEX).exists() and not (home / _WEIGHTS).exists():
        return model
    tensors = _stored(home)
    if model.tied and _own_head(tensors):
        model = model.changed(tied=False)
    _refuse_differing(folder, model, _wanted(tensors, model))
    return model


def _own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether there is a head that differs from the table."""
    if _HEAD not in tensors or _TABLE not in tensors:
        return _HEAD in tensors
    return not torch.equal(*(weight_files.value(name, tensors[name]).float() for name in (_HEAD, _TABLE)))


def _refuse_differing(folder: str | Path, model: config.Decoder, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises UserError where the names or shapes of `tensors` are not those of the model. Its layers are alike, so one
    of them is built, without values."""
    if isinstance(model, config.Moe) and model.experts > len(tensors):
        raise UserError(f"{folder} holds {len(tensors)} tensors, and its {CONFIG} says {model.experts} experts.")
    with parsing(Path(folder) / CONFIG, "download the folder again"):
        small = model.changed(depth=1, context=2)
        with torch.device("meta"):
            layer = MOE(small) if isinstance(small, config.Moe) else GPT(small)
    depth = model.depth
    given: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        given |= to_ours(name, torch.empty(stored.shape, device="meta"), sizes(model))
    layers = {int(match[1]) for name in given if (match := _LAYER.match(name))}
    shapes = {
        _LAYER.sub(f"blocks.{number}.", name): tuple(value.shape)
        for name, value in layer.state_dict().items()
        for number in (sorted(layers) if _LAYER.match(name) else [0])
    }
    differing = [
        *([] if len(layers) == depth else [f"it has {len(layers)} layers, and its {CONFIG} says {depth}"]),
        *differences(given, shapes, f"and its {CONFIG} says"),
        *(
            f"{name} is {stored.dtype}, which is not read"
            for name, stored in tensors.items()
            if stored.dtype not in DTYPES
        ),
    ]
    if differing:
        more = f" (and {len(differing) - 5} more)" if len(differing) > 5 else ""
        named = ", ".join(differing[:5]) + more
        raise UserError(
            f"{folder} does not hold the weights its {CONFIG} describes.", why=named, do="download it again"
        )


def differences(
    given: Mapping[str, StoredTensor | Tensor], shapes: Mapping[str, tuple[int, ...]], origin: str
) -> Iterator[str]:
    """What of the tensors `given` has other names or shapes than `shapes`, which have their `origin`."""
    yield from (f"{name} is missing" for name in shapes if name not in given)
    yield from (f"{printable(name)} is not known" for name in given if name not in shapes)
    for name, shape in shapes.items():
        if name in given and given[name].shape != shape:
            yield f"{name} is {list(given[name].shape)}, {origin} {list(shape)}"


def notes(folder: str | Path) -> list[str]:
    """What of a folder of weights is not used, and what is read as something else."""
    home = opened(folder)
    table = read_table(home / CONFIG, _FOLDER)
    tensors = _stored(home)
    sentences = [f"{name} of {folder}" for name in hf_config.unused_keys(table)]
    if table.get("tie_word_embeddings") and _HEAD in tensors and _own_head(tensors):
        sentences.append(
            f"{_HEAD} of {folder} differs from the token table: it is kept as a head of its own, "
            f"although {CONFIG} says tie_word_embeddings = true"
        )
    buffers = Counter(_pattern(name) for name in tensors if _BUFFER.search(name))
    sentences += [unused("tensor", name, plural(count, "layer")) for name, count in sorted(buffers.items())]
    types = sorted({stored.dtype for stored in tensors.values()} - {"F32"})
    if types:
        sentences.append(f"the weights of {folder} are stored as {', '.join(types)} and read as F32")
    used = {stored.file.name for stored in tensors.values()}
    sentences += [
        unused("file", file.name, str(folder))
        for file in sorted(home.iterdir())
        if file.suffix in _FORMATS and file.name not in used
    ]
    more = home / gguf_file.NOTES
    return sentences + (list(json.loads(more.read_text())) if more.is_file() else [])


def tokenizer_of(folder: str | Path) -> Path | None:
    """The `tokenizer.json` beside the weights in `folder`; None where there is none."""
    return file if (file := opened(folder) / "tokenizer.json").is_file() else None


def options_of(size: DecoderSizes) -> config.Decoder:
    """The model options that say `size`."""
    names = set(config.Gpt.__struct_fields__) & {field.name for field in fields(size)} - {"layers"}
    head = size.head_size if size.query_width != size.width else None
    shared: dict[str, Any] = {"depth": size.layers, "head_size": head} | {name: getattr(size, name) for name in names}
    usual = {
        "attention_scale": size.head_size**-0.5,
        "local_theta": size.rope_theta,
        "attention_bias": size.blocks.always_biased or None,
    }
    plain = config.Gpt()
    shared |= {name: getattr(plain, name) for name, value in usual.items() if shared[name] == value}
    if size.experts == 1:
        return config.Gpt(**shared)
    routing = {name: getattr(size, name) for name in ROUTING}
    return config.Moe(**shared, **routing, balancing="bias" if size.bias else "loss")


def _stored(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder, in one file or in several with an index, by its stored name.

    Raises UserError for a file that is missing or damaged, and for an index that says something else than the files.
    """
    tensors = weight_files.stored(_files(folder))
    for name, file in _weight_map(folder).items():
        if name not in tensors or tensors[name].file.name != file:
            raise UserError(
                f"{folder / INDEX} says that {printable(name)} is in {file}, where it is not.", do="download it again"
            )
    return tensors


def _files(folder: Path) -> list[Path]:
    files = [folder / _WEIGHTS]
    if (folder / INDEX).exists():
        names = sorted({*_weight_map(folder).values()})
        for name in names:
            if name in ("", "..") or name != Path(name).name:
                what = f"{folder / INDEX} names {name!r}, which is no file of the folder."
                raise UserError(what, do="download it again")
        files = [folder / name for name in names]
        if (folder / _WEIGHTS).exists() and folder / _WEIGHTS not in files:
            raise UserError(
                f"{folder} holds weights twice: {_WEIGHTS}, and {INDEX} with other files.",
                why="they may differ",
                do="move one of the two away",
            )
    for file in files:
        if not file.exists():
            raise UserError(
                f"No weights at {file}.",
                why="only safetensors are read",
                do="download them; of a pytorch_model.bin, espalier init says how to convert it",
            )
    return files


def _weight_map(folder: Path) -> dict[str, str]:
    if not (folder / INDEX).exists():
        return {}
    table = read_table(folder / INDEX, _FOLDER).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise UserError(f"{folder / INDEX} does not say which file holds which tensor.", do="download it again")
    return table


def renamed(name: str, kind: str = "llama") -> str:
    """The name that our tensor `name` has in a model of `kind`."""
    return _renamed(name, _theirs(kind))


def ours(name: str, kind: str = "llama") -> str:
    """Our name for the tensor `name` of a model of `kind`."""
    return _renamed(name, {theirs: ours for ours, theirs in _theirs(kind).items()})


def _pattern(name: str) -> str:
    return _NUMBER.sub("{}", name)


def _renamed(name: str, table: Mapping[str, str]) -> str:
    pattern = _pattern(name)
    return table[pattern].format(*_NUMBER.findall(name)) if pattern in table else name


def write_json(path: Path, table: JsonObject) -> None:
    """Writes `table` as indented JSON."""
    path.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
