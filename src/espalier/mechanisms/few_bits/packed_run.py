"""`espalier export RUN --to packed`: a folder that predicts by itself, with features and matrices in Adaptive-Packages.

`packed.pkg` has the rows that layers read and the matrices, `model.safetensors` what else the model has, `run.toml` the
recipe, `preprocessing/` the graph without its features, which are in the package.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from espalier.graph.data.kept_graph import KeptGraph
from espalier.graph.parts import part_inference
from espalier.graph.sampling.subgraphs import infer
from espalier.graph.tasks.node_classification import NodeTask
from espalier.graph.workload import GraphWorkload
from espalier.kernels.step_codes import step_codes
from espalier.mechanisms.few_bits import quantization
from espalier.mechanisms.few_bits.a2q import Coded, ColumnQuantizer, FeatureQuantizer
from espalier.mechanisms.few_bits.bit_allocator import STEP_RATE, NodeBits
from espalier.mechanisms.few_bits.mega import package_file
from espalier.mechanisms.few_bits.mega.package import PackedRows, encode
from espalier.parallel.workload import Workload
from espalier.recipe import cache_dir, data_hash, recipe_file
from espalier.recipe.errors import UserError
from espalier.recipe.units import show_size

if TYPE_CHECKING:
    from espalier.graph.data.graph import Array

PACKED = "packed.pkg"
REST = "model.safetensors"
_INPUT = "layers.0.rows"
_SCALE = "layers.0.scale"
_MATRIX = ".parametrizations.weight.original"


def write(workload: Workload, model: nn.Module, folder: Path) -> str:
    """Writes the folder, read back and compared, and says what its bytes are for. Raises UserError."""
    assert isinstance(workload, GraphWorkload)
    quantizers = quantization.quantization_of(model)
    task = workload.task
    if quantizers is None or not isinstance(task, NodeTask) or workload.recipe.store is not None:
        raise UserError(
            "This run has nothing to pack.",
            why="networks that were trained with [quant] to predict nodes of a graph in memory have",
            do="--to safetensors, or a run of a recipe with [quant]",
        )
    if workload.graph.partition is not None:
        signs = workload.rounding.signs
        workload = GraphWorkload(workload.recipe, part_inference.whole_graph(workload.graph), workload.folder)
        workload.signs, task = signs, workload.whole_task
    with quantization.packing(quantizers) as stored:
        infer(model, task.view)
    assert all(packed.rows == workload.graph.nodes for packed in stored.values())
    by_node = tuple(_by_node(model))  # of each row the package has width and step
    rest = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.endswith(_MATRIX) and not name.startswith(by_node)
    }
    matrices = {**stored, **packed_weights(model)}
    if _INPUT not in matrices:
        matrices[_INPUT], rest[_SCALE] = packed_input(task.view.graph.features)
    data = package_file.to_bytes(matrices, {"quant": type(quantizers.options).__struct_config__.tag})

    def fill(place: Path) -> None:
        (place / PACKED).write_bytes(data)
        save_file({name: tensor.contiguous() for name, tensor in rest.items()}, place / REST)
        back, _ = package_file.read(place / PACKED)
        for name, matrix in matrices.items():
            if not torch.equal(back[name].decoded().codes, matrix.decoded().codes):
                raise OSError(f"{name} was read back changed")
        (place / "run.toml").write_text(recipe_file.dump(workload.recipe), encoding="utf-8")
        preprocessing = place / "preprocessing"
        preprocessing.mkdir()
        graph = workload.graph
        workload.freeze(preprocessing, replace(graph, features=np.zeros((graph.nodes, 0), np.float32)))
        (preprocessing / "hashes.json").write_text(json.dumps(data_hash.in_folder(preprocessing)), encoding="utf-8")

    cache_dir.export(folder, PACKED, fill)
    sizes = package_file.file_sizes(data)
    parts = {name: getattr(sizes, name) / 8 for name in ("payload", "header", "padding", "bitmap", "index", "steps")}
    floats = sum(4 * matrix.rows * matrix.columns for matrix in matrices.values())
    listed = ", ".join(f"{name} {show_size(round(size))}" for name, size in parts.items())
    return (
        f"{PACKED} has {show_size(len(data))} where fp32 takes {show_size(floats)}: {listed}\n"
        f"  espalier predict {folder} answers from it"
    )


def with_features(kept_graph: KeptGraph, folder: Path) -> KeptGraph:
    """`kept_graph` with the features of the package in `folder`; as it is where there is none."""
    if not (folder / PACKED).exists():
        return kept_graph
    matrices, _ = package_file.read(folder / PACKED)
    rows = matrices[_INPUT].values()
    scale = _rest(folder).get(_SCALE)
    features = (rows if scale is None else rows * scale[:, None]).numpy()
    graph = replace(kept_graph.graph, features=features, placed=True)
    return replace(kept_graph, graph=graph, widths=(features.shape[1], kept_graph.widths[1]))


def load(model: nn.Module, folder: Path) -> bool:
    """Fills `model` from the package in `folder`; whether there is one. Raises UserError where it is damaged or of
    another model."""
    if not (folder / PACKED).exists():
        return False
    matrices, _ = package_file.read(folder / PACKED)
    state = {name: tensor for name, tensor in _rest(folder).items() if name != _SCALE}
    state |= _packed_pairs(model, matrices)
    for name, matrix in matrices.items():
        if name.endswith(".weight"):
            state[name.removesuffix(".weight") + _MATRIX] = matrix.values()
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(f"{folder} does not hold this model: {error}", do="espalier export RUN --to packed") from None
    return True


def _by_node(model: nn.Module) -> dict[str, FeatureQuantizer]:
    """The quantizers with a pair for each node by the names that begin those of their pairs."""
    names = {module: name for name, module in model.named_modules()}
    features = quantization.equipped(model).features
    return {f"{names[each]}.allocator.": each for each in features if isinstance(each.allocator, NodeBits)}


def _packed_pairs(model: nn.Module, matrices: Mapping[str, PackedRows]) -> dict[str, Tensor]:
    """Pairs of nodes, from the rows of the package. `model` then rounds each row as it is there."""
    quantizers = quantization.equipped(model)
    pairs = dict[str, Tensor]()
    for start, quantizer in _by_node(model).items():
        allocator = quantizer.allocator
        if isinstance(allocator, NodeBits):
            rows = matrices[quantizers.name(quantizer)].decoded()
            allocator.take(rows.widths, rows.steps, quantizer.rule.signed)
            quantizer.shift = float
            quantizers.target = None
            pairs |= {start + name: value for name, value in allocator.state_dict().items()}
    return pairs


def packed_weights(model: nn.Module) -> dict[str, PackedRows]:
    """The quantized matrices of `model` by name, in packages: a row for each output."""
    packed = {}
    for name, module in model.named_modules():
        inner: Any = getattr(module, "parametrizations", None)
        quantizer = inner["weight"][0] if parametrize.is_parametrized(module, "weight") else None
        if isinstance(quantizer, ColumnQuantizer):
            codes, _ = quantizer.codes(inner["weight"].original)
            widths = torch.full((len(codes),), quantizer.bits, dtype=torch.uint8)
            packed[f"{name}.weight"] = encode(Coded(codes, widths, step_codes(quantizer.raw_step * STEP_RATE)))
    return packed


def packed_input(features: Array) -> tuple[PackedRows, Tensor]:
    """Features of which each row has one value but 0, as one bit each, and float32 [rows] of that value. Raises
    UserError for others."""
    rows = torch.from_numpy(np.ascontiguousarray(features, np.float32))
    codes = (rows != 0).to(torch.uint8)
    scale = rows.amax(1)
    if not torch.equal(codes * scale[:, None], rows):
        row = int((codes * scale[:, None] != rows).any(1).nonzero()[0])
        raise UserError(
            "The features cannot be packed as one bit a value.",
            why=f"row {row} has several values, and the network reads it unquantized",
            do="--to safetensors, or train anew: features are then quantized",
        )
    ones = torch.ones(len(codes), dtype=torch.uint8)
    return encode(Coded(codes, ones, ones * 128)), scale


def _rest(folder: Path) -> Mapping[str, Tensor]:
    try:
        return dict(load_file(folder / REST))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / REST} cannot be read: {error}.", do="espalier export RUN --to packed") from None
