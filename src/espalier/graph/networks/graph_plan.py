"""Graph plan: the order of the nodes, the format of the matrix and what each layer aggregates, with reasons.

Decisions are made from counts, not from clocks, so that every rank and every resumed run makes the same. They are worth
making only where the whole graph is passed over at every step: drawn neighbourhoods are new each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from zipfile import BadZipFile

import numpy as np
import torch

from espalier.graph.data.graph import Array, Graph, relabelled
from espalier.graph.networks import gpu_products
from espalier.graph.networks.base import MessageBlock
from espalier.graph.networks.compiled_aggregate import matrix
from espalier.graph.networks.gnn import GraphAttention, Layer
from espalier.graph.networks.gpu_products import SMALL
from espalier.recipe import data_hash
from espalier.recipe.cache_dir import cache_folder, hashed, keep_made
from espalier.recipe.units import show_seconds
from espalier.sparse import CBM
from espalier.sparse.cbm.matrix import pays
from espalier.sparse.cost import cost
from espalier.sparse.order_choice import MOST_PARTS, grouped, order
from espalier.sparse.partition import library
from espalier.sparse.rcmpp import rcmpp
from espalier.sparse.rcmpp.cuthill_mckee import trace
from espalier.sparse.rcmpp.pattern import SparsityPattern
from espalier.track.progress import Stages

Reordered = tuple[Array, str]
"""A permutation of the nodes, and the sentence that says why."""
ORDERS = 2
"""Of kept orders: another number where the same edges are ordered otherwise."""
CLUSTER = 256
"""Nodes of a cluster of `graph.order = "clusters"`."""
PRODUCTS_TO_BUILD = 25
"""CSR products that compressing a matrix takes at most (bench/cbm.py's target)."""


def ordered(graph: Graph, wanted: str) -> tuple[Graph, str]:
    """`graph` in the order `wanted` ("auto": the advisor's), and a sentence that says so."""
    if wanted == "none":
        return graph, "Order: as given (graph.order = none)."
    if wanted == "rcmpp":
        return relabelled(graph, rcmpp(graph.indptr, graph.indices)), "Order: RCM++ (graph.order = rcmpp)."
    if wanted == "clusters":
        permutation, sentence = _kept(graph, wanted, lambda: _clusters(graph))
        return relabelled(graph, permutation), sentence
    if graph.edges * graph.features.shape[1] < SMALL:
        return graph, "Order: as given; the graph is small."
    permutation, sentence = _kept(graph, f"{wanted} {graph.features.shape[1]}", lambda: _advised(graph))
    return (relabelled(graph, permutation) if len(permutation) else graph), sentence


def _advised(graph: Graph) -> Reordered:
    """The advisor's permutation, empty where it is none, and a sentence."""
    advice = order(graph, for_="spmm")
    if advice.permutation is None:
        return np.zeros(0, np.int64), f"Order: as given; {advice.reason}."
    named = f"clusters by {library()}, RCM++ inside" if advice.method == "clusters" else "RCM++"
    return np.asarray(advice.permutation, np.int64), f"Order: {named}; {advice.reason}."


def _clusters(graph: Graph) -> Reordered:
    """Clusters in the order in which RCM++ passes them, their nodes too, and a sentence."""
    pattern = SparsityPattern.of(graph.indptr, graph.indices)
    parts = max(1, min(MOST_PARTS, graph.nodes // CLUSTER))
    sentence = f"Order: {parts:,} clusters by {library()}, RCM++ inside (graph.order = clusters)."
    return grouped(pattern, trace(pattern).permutation, parts).astype(np.int64), sentence


def _kept(graph: Graph, wanted: str, make: Callable[[], Reordered]) -> Reordered:
    """The order of a graph's nodes and its sentence, from the cache where the same edges were ordered before."""
    place = (
        cache_folder()
        / "orders"
        / f"{hashed([data_hash.of_arrays(graph.indptr, graph.indices), wanted, library(), ORDERS])}.npz"
    )
    with suppress(OSError, ValueError, KeyError, BadZipFile), place.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        return archive["permutation"], str(archive["said"])
    with Stages("Ordering the graph"):
        permutation, sentence = make()
    keep_made(place, lambda file: np.savez(file, permutation=permutation, said=sentence))
    return permutation, sentence


def formatted(block: MessageBlock, layers: Sequence[Layer], wanted: str, steps: int) -> str:
    """Gives `block` its format: CSR, or CBM where that is predicted to repay its making in `steps`. A sentence."""
    if isinstance(layers[0], GraphAttention):
        return "Format: CSR; attention weighs every edge anew."
    block.forms.known["stands"] = True
    plain = matrix(block)
    width = max(min(layer.inputs, layer.outputs) for layer in layers)

    def seconds(additions: int) -> float:
        return float(cost(block.targets, additions, width, torch.get_num_threads()).seconds["aggregate"])

    csr = seconds(block.edges)
    if wanted == "csr":
        return f"Format: CSR (graph.format = csr), {show_seconds(csr)} per product of {width} columns by estimate."
    if plain.values is not None and plain.scale is None:
        return f"Format: CSR, {show_seconds(csr)} per product of {width} columns by estimate; weighted edges need it."
    compressed = CBM.of(plain)
    if compressed.deltas is None:
        return (
            f"Format: CSR, {show_seconds(csr)} per product by estimate; rows are too unlike for CBM to save additions."
        )
    additions = compressed.deltas.additions
    cbm = seconds(additions)
    if wanted != "cbm" and not pays(block.edges, additions, block.targets, width):
        return f"Format: CSR; {additions:,} additions of {width} columns save no time, for rows are short."
    saved = 2 * len(layers) * steps * (csr - cbm)
    estimates = f"CBM {show_seconds(cbm)} per product of {width} columns by estimate, CSR {show_seconds(csr)}"
    if wanted != "cbm" and saved < PRODUCTS_TO_BUILD * csr:
        return f"Format: CSR; {estimates}; making it takes longer than {steps:,} steps would save."
    block.forms.known["compressed"] = compressed
    return f"Format: CBM, {additions:,} additions per column instead of {block.edges:,}; {estimates}."


def on_gpus(sentences: Sequence[str]) -> dict[str, str]:
    """Those of `sentences` that are of processors' products, and what is said where ranks are on GPUs."""
    of_processors = (sentence for sentence in sentences if sentence.startswith("Format: ") and "estimate" in sentence)
    return dict.fromkeys(of_processors, gpu_products.SENTENCE)


def passes(layers: Sequence[Layer], k: int | None, once: bool) -> list[str]:
    """A sentence for each layer: what it aggregates. `once`: the first one's rows are the same at every step."""
    sentences = []
    for at, layer in enumerate(layers):
        if k is not None and at > 0:
            what = f"aggregates the {k} kept of {layer.inputs} columns (CBSR), then maps them to {layer.outputs}"
        elif not isinstance(layer, GraphAttention) and layer.inputs <= layer.outputs:
            reuse = " once and keeps the sums, for its rows are the same at every step" if once and at == 0 else ""
            what = f"aggregates {layer.inputs} columns{reuse}, then maps them to {layer.outputs}"
        else:
            what = f"maps {layer.inputs} columns to {layer.outputs}, then aggregates those"
        sentences.append(f"Layer {at + 1} {what}.")
    return sentences
