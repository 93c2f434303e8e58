"""Attention over a graph's pattern: one operator, exact under every plan: edge, block and hybrid.

After TorchGT (arXiv 2407.14106). Its two attentions differ here in their mask alone: the same softmax, the same scale.
Where the authors move entries into dense blocks at other places, these plans keep every entry. Partial
softmaxes over blocks and over single entries are merged by log-sum-exp.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from espalier.kernels.merge import merge
from espalier.mechanisms.pattern_attention.edge_attention import EdgeAttention
from espalier.mechanisms.pattern_attention.pattern import Divided, Pattern, Windows
from espalier.recipe.errors import UserError, nearest
from espalier.sparse import CSR

Plan = Literal["auto", "edge", "block", "hybrid"]
PLANS = ("auto", "edge", "block", "hybrid")
LEAST = 5
"""Rows of a window that read a column from which on `hybrid` computes it densely, unless it is told otherwise: a dense
column takes as long as 4.7 entries (cliques of 64 tokens, 4 heads of 16, an AMD EPYC with AVX2)."""


class AttentionPlan(NamedTuple):
    """How a pattern is computed: `least` rows of 16 that read a column make it dense (1: all, `block`; 0: none)."""

    name: str
    least: int


EDGE = AttentionPlan("edge", 0)
BLOCK = AttentionPlan("block", 1)
HYBRID = AttentionPlan("hybrid", LEAST)


class AttentionOptions(TypedDict, total=False):
    """What `attention` takes besides; every key may be left out."""

    bias: Tensor | None
    """[entries, heads] in the order of the pattern's entries, each of which is there once (`Pattern.entry` finds them);
    of a full pattern [heads, tokens, tokens]. Has a gradient. -inf removes an entry."""
    plan: Plan | AttentionPlan
    """`edge` (default), `block`, `hybrid`, or `auto`: the one that takes less time, measured or by the
    pattern's counts."""


def attention(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, **options: Unpack[AttentionOptions]) -> Tensor:
    """Softmax attention of each token over those that `pattern` names for it. Differentiable; exact under every plan.

    out[i, h] = Σ_j softmax_j(<q[i, h], k[j, h]> / √width + bias[ij, h]) v[j, h] over the entries ij of row i.

    Args:
        q, k, v: float32 or float64 [tokens, heads, width].
        pattern: `Pattern.of`, `pattern(edges, nodes)` or `Pattern.full`.
        options: `bias` and `plan`, see `AttentionOptions`.

    Returns:
        [tokens, heads, width]; zeros for a token that attends to none. What is not finite in a token reaches those that
        attend to it; under `block` and `hybrid` perhaps all 16 rows of a window that has one of these.

    Raises UserError: shapes that do not fit, other types, an unknown plan.
    """
    bias = options.get("bias")
    plan = options.get("plan", "edge")
    _check(q, k, v, pattern, bias)
    chosen = _plan(plan, pattern)
    if pattern.matrix is None:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = None if bias is None else bias[None]
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)[0].transpose(0, 1)
    if q.device.type != "cpu":
        return EdgeAttention.apply(q, k, v, bias, pattern.on(q.device))
    return _Attention.apply(q, k, v, bias, (pattern, chosen))


def reference(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, bias: Tensor | None = None) -> Tensor:
    """The plain form: dense attention under the pattern's mask, [tokens, tokens] in memory."""
    tokens, heads, width = q.shape
    scores = torch.einsum("ihd,jhd->hij", q, k) / width**0.5
    mask = pattern.dense().to(q.device)
    if bias is not None and pattern.matrix is None:
        scores = scores + bias
    elif bias is not None and pattern.matrix is not None:
        places = (pattern.matrix.rows, pattern.matrix.indices.long())
        scores = scores + bias.new_zeros(tokens, tokens, heads).index_put(places, bias).permute(2, 0, 1)
    scores = scores.masked_fill(~mask, -torch.inf)
    shares = torch.where(scores.isneginf().all(-1, keepdim=True), scores.new_zeros(()), scores.softmax(-1))
    return torch.einsum("hij,jhd->ihd", shares, v)


def _plan(plan: str | AttentionPlan, pattern: Pattern) -> AttentionPlan:
    if isinstance(plan, AttentionPlan):
        return plan
    if plan not in PLANS:
        near = nearest(str(plan), PLANS)
        raise UserError(f"plan = {plan!r} is not known.", why=f"there are {', '.join(PLANS)}", do=f"{near or 'edge'!r}")
    if plan == "auto":
        measured: AttentionPlan | None = pattern.chosen.get("auto")
        return measured or by_counts(pattern)
    return {"edge": EDGE, "block": BLOCK, "hybrid": HYBRID}[plan]


COLUMN = 4.7
"""Entries that take as long as a dense column of a window (see `LEAST`)."""
MERGED = 2.0
"""Entries that take as long as merging the two parts of a row."""
WORTH = 0.9
"""Share of the time by single entries below which windows are made."""


def by_counts(pattern: Pattern) -> AttentionPlan:
    """The plan that takes less time by counts alone, so that every rank and every resumed run finds the same."""
    if pattern.matrix is None or pattern.entries < COLUMN * pattern.tokens:
        return EDGE
    times = {plan: predicted(pattern, plan) for plan in (EDGE, HYBRID)}
    return HYBRID if times[HYBRID] < WORTH * times[EDGE] else EDGE


def predicted(pattern: Pattern, plan: AttentionPlan) -> float:
    """The time of a plan, in those of single entries."""
    if plan.least == 0:
        return float(pattern.entries)
    columns, inside = pattern.dense_columns(plan.least)
    rest = pattern.entries - inside
    return COLUMN * columns + rest + (MERGED * pattern.tokens if rest else 0.0)


def _check(q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, bias: Tensor | None) -> None:
    if q.dim() != 3 or len(q) != pattern.tokens:
        raise UserError(
            f"q has shape {tuple(q.shape)}, and the pattern has {pattern.tokens} tokens.",
            do=f"[{pattern.tokens}, heads, width], virtual tokens included",
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            raise UserError(f"{name} is {_told(tensor)}, q is {_told(q)}.", do="the same shape and type for all three")
    if q.dtype not in (torch.float32, torch.float64) and pattern.matrix is not None:
        raise UserError(f"q is {_told(q)}.", do="q.float(): attention over a pattern is computed in float32 or float64")
    if bias is None:
        return
    heads = q.shape[1]
    tokens = pattern.tokens
    wanted = (heads, tokens, tokens) if pattern.matrix is None else (pattern.entries, heads)
    if tuple(bias.shape) != wanted or bias.dtype != q.dtype:
        kind = str(q.dtype).removeprefix("torch.")
        do = "one for each entry of the pattern, in which a repeated one is there once"
        raise UserError(f"bias is {_told(bias)}.", why=f"here it is {kind} {list(wanted)}", do=do)


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


class _Rows(NamedTuple):
    """What the kernels read, contiguous [tokens, heads · width]; bias [entries or 0, heads]."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor
    scale: float


class _Saved(NamedTuple):
    """What backward knows besides: logarithms, <gradient, out> [tokens, heads], gradient [tokens, heads · width]."""

    logs: Tensor
    weighted: Tensor
    gradient: Tensor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, how: Any) -> Tensor:
        pattern, plan = how
        heads = q.shape[1]
        flat = [tensor.detach().reshape(len(tensor), -1).contiguous() for tensor in (q, k, v)]
        biases = q.new_empty(0, heads) if bias is None else bias.detach().contiguous()
        rows = _Rows(flat[0], flat[1], flat[2], biases, q.shape[2] ** -0.5)
        out, logs = _forward(pattern, pattern.divided(plan.least).by_row, rows)
        ctx.how = how
        ctx.biased = bias is not None
        ctx.save_for_backward(*flat, biases, out, logs)
        return out.view(q.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, out, logs = ctx.saved_tensors
        pattern, plan = ctx.how
        shape = gradients[0].shape
        rows = _Rows(q, k, v, bias, shape[2] ** -0.5)
        gradient = gradients[0].reshape(len(q), -1).contiguous()
        weighted = (gradient * out).view(len(q), shape[1], -1).sum(-1)
        saved = _Saved(logs.masked_fill(logs.isneginf(), 0), weighted, gradient)
        dq, dk, dv, dbias = _backward(pattern, pattern.divided(plan.least), rows, saved)
        return dq.view(shape), dk.view(shape), dv.view(shape), dbias if ctx.biased else None, None


def _forward(pattern: Pattern, windows: Windows | None, rows: _Rows) -> tuple[Tensor, Tensor]:
    from espalier.mechanisms.pattern_attention import edge_kernels

    assert pattern.matrix is not None
    q, k, v, bias, scale = rows
    heads = bias.shape[1]
    out = torch.empty_like(q)
    logs = q.new_empty(len(q), heads)
    if windows is None:
        edge_kernels.edge_forward(out, logs, *_csr(pattern.matrix), q, k, v, bias, scale)
        return out, logs
    from espalier.mechanisms.pattern_attention import window_kernels

    window_kernels.window_forward(out, logs, *_arrays(windows), q, k, v, bias, scale)
    if windows.rest.entries:
        more = torch.empty_like(out)
        more_logs = torch.empty_like(logs)
        bias = _taken(bias, windows.rest_entries)
        edge_kernels.edge_forward(more, more_logs, *_csr(windows.rest), q, k, v, bias, scale)
        merge(out.view(len(q), heads, -1), logs, more.view(len(q), heads, -1), more_logs)
    return out, logs


def _backward(pattern: Pattern, divided: Divided, rows: _Rows, saved: _Saved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert pattern.matrix is not None
    q, k, v, bias, scale = rows
    dq, dk, dv, dbias = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.zeros_like(bias)
    how = saved.logs, saved.weighted, scale
    queries = (q, saved.gradient)
    keys = (k, v)
    _backward_of((divided.by_row, pattern.matrix), (dq, dq[:0], dbias), (*queries, *keys, bias), (*how, 0))
    turned, order = pattern.matrix.transpose
    bias = _taken(bias, order)
    _backward_of((divided.by_column, turned), (dk, dv, bias[:0]), (*keys, *queries, bias), (*how, 1))
    return dq, dk, dv, dbias


def _backward_of(
    pattern: tuple[Windows | None, CSR], made: tuple[Tensor, ...], sides: tuple[Tensor, ...], how: tuple[Any, ...]
) -> None:
    """Fills `made`, gradients by row or by column: by windows where there are some, what they leave entry by entry. See
    `edge_kernels.edge_backward`."""
    from espalier.mechanisms.pattern_attention import edge_kernels

    windows, rest = pattern
    if windows is None:
        edge_kernels.edge_backward(*made, *_csr(rest), *sides, *how, 0)
        return
    from espalier.mechanisms.pattern_attention import window_kernels

    window_kernels.window_backward(*made, *_arrays(windows), *sides, *how)
    if windows.rest.entries:
        (*outputs, dbias), (*factors, bias) = made, sides
        rest_dbias, rest_bias = (_taken(values, windows.rest_entries) for values in (dbias, bias))
        edge_kernels.edge_backward(*outputs, rest_dbias, *_csr(windows.rest), *factors, rest_bias, *how, 1)
        if len(dbias):
            dbias[windows.rest_entries] = rest_dbias


def _taken(values: Tensor, entries: Tensor) -> Tensor:
    return values[entries] if len(values) else values


def _arrays(windows: Windows) -> tuple[Any, ...]:
    return tuple(array.numpy() for array in windows[:5]), windows.cuts


def _csr(matrix: CSR) -> tuple[Any, ...]:
    return (matrix.indptr.numpy(), matrix.indices.numpy()), matrix.cuts
