"""Attention over a pattern: every plan is dense masked attention, in outputs and gradients, for any order of tokens."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from csr_of import csr_of
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from espalier import graph
from espalier.mechanisms.pattern_attention import attention as operator
from espalier.mechanisms.pattern_attention import edge_attention
from espalier.mechanisms.pattern_attention import pattern as patterns
from espalier.mechanisms.pattern_attention.attention import AttentionPlan, attention, reference
from espalier.mechanisms.pattern_attention.over_ranks import RankedAttention
from espalier.mechanisms.pattern_attention.pattern import Additions, Pattern, pattern
from espalier.recipe.errors import UserError
from espalier.sparse import CSR
from many_ranks import ranks

THRESHOLDS = (1, 2, 3, 8, 16, 17)
"""Rows of a window that read a column from which on it is dense, beside the 5 of `hybrid`: all, some, none."""
PLANS = ("edge", "block", "hybrid", *(AttentionPlan("hybrid", least) for least in THRESHOLDS), "auto")
PATTERNS = {
    "edges": Additions(),
    "no loops": Additions(loops=False),
    "everything": Additions(path=True, virtual=3, expander=2),
}


def made(nodes: int, edges: int, additions=None, seed: int = 0) -> Pattern:
    drawn = torch.Generator().manual_seed(seed)
    return pattern(torch.randint(0, nodes, (2, edges), generator=drawn), nodes, additions)


def inputs(tokens: int, heads: int, width: int, dtype=torch.float64, seed: int = 1):
    drawn = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, width, dtype=dtype, generator=drawn).requires_grad_() for _ in range(3)]


def outcome(function, leaves, gradient):
    out = function()
    return [out.detach(), *torch.autograd.grad(out, leaves, gradient)]


def compare(found, wanted, tolerance):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("shape", [(37, 150, 3, 5), (50, 12, 2, 16), (1, 0, 2, 4)])
def test_every_plan_is_dense_masked_attention_in_float64(shape, kind, biased):
    nodes, edges, heads, width = shape
    known = made(nodes, edges, PATTERNS[kind])
    q, k, v = inputs(known.tokens, heads, width)
    bias = torch.randn(known.entries, heads, dtype=torch.float64, requires_grad=True) if biased else None
    leaves, gradient = [q, k, v, *([bias] if biased else [])], torch.randn_like(q)
    wanted = outcome(lambda: reference(q, k, v, known, bias), leaves, gradient)
    for plan in PLANS:
        compare(outcome(lambda p=plan: attention(q, k, v, known, bias=bias, plan=p), leaves, gradient), wanted, 1e-10)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", PATTERNS)
@pytest.mark.parametrize("gathered", [1 << 26, 99])
def test_attention_of_accelerators_is_dense_masked_attention_in_float64(monkeypatch, gathered, kind, biased):
    """Its rows in one piece, and in many."""
    monkeypatch.setattr(edge_attention, "GATHERED", gathered)
    known = made(37, 150, PATTERNS[kind])
    q, k, v = inputs(known.tokens, 3, 5)
    bias = torch.randn(known.entries, 3, dtype=torch.float64, requires_grad=True) if biased else None
    leaves, gradient = [q, k, v, *([bias] if biased else [])], torch.randn_like(q)
    wanted = outcome(lambda: reference(q, k, v, known, bias), leaves, gradient)
    entries = known.on(torch.device("cpu"))
    found = outcome(lambda: edge_attention.EdgeAttention.apply(q, k, v, bias, entries), leaves, gradient)
    compare(found, wanted, 1e-10)


def test_the_reference_is_scaled_dot_product_attention():
    known = made(40, 160)
    q, k, v = inputs(40, 2, 8)
    found = functional.scaled_dot_product_attention(
        *(one.transpose(0, 1) for one in (q, k, v)), attn_mask=known.dense()
    )
    torch.testing.assert_close(reference(q, k, v, known), found.transpose(0, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("plan", ["edge", "block", "hybrid"])
def test_float32_is_near_float64(plan):
    known = made(200, 2000, Additions(virtual=1))
    q, k, v = inputs(known.tokens, 4, 16, torch.float32)
    gradient = torch.randn_like(q)
    found = outcome(lambda: attention(q, k, v, known, plan=plan), [q, k, v], gradient)
    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    wanted = outcome(lambda: reference(*wide, known), wide, gradient.double())
    compare([one.double() for one in found], wanted, 1e-5)


def test_a_full_pattern_is_full_attention_with_its_bias():
    q, k, v = inputs(20, 2, 4)
    bias = torch.randn(2, 20, 20, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn_like(q)
    full = Pattern.full(20)
    found = outcome(lambda: attention(q, k, v, full, bias=bias), [q, k, v, bias], gradient)
    compare(found, outcome(lambda: reference(q, k, v, full, bias), [q, k, v, bias], gradient), 1e-10)
    every = Pattern.of(csr_of(torch.ones(20, 20)))
    compare([attention(q, k, v, every, plan="block")], [attention(q, k, v, full)], 1e-10)


@pytest.mark.parametrize("plan", ["edge", "block", "hybrid"])
def test_the_order_of_the_tokens_changes_neither_answers_nor_gradients(plan):
    edges = torch.randint(0, 60, (2, 400), generator=torch.Generator().manual_seed(3))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(4))
    place = torch.empty_like(order)
    place[order] = torch.arange(60)
    here, there = pattern(edges, 60), pattern(place[edges], 60)
    rows, columns = here.matrix.rows, here.matrix.indices.long()
    at = there.entry(place[columns], place[rows])  # the other pattern's entry of each of this one's
    bias = torch.randn(here.entries, 2, dtype=torch.float64)
    leaves, gradient = [*inputs(60, 2, 8), bias.requires_grad_()], torch.randn(60, 2, 8, dtype=torch.float64)
    moved = torch.empty_like(bias)
    moved[at] = bias.detach()
    others = [*(one.detach()[order].requires_grad_() for one in leaves[:3]), moved.requires_grad_()]

    def of(leaves, known):
        return lambda: attention(*leaves[:3], known, bias=leaves[3], plan=plan)

    out, *slopes, of_bias = outcome(of(leaves, here), leaves, gradient)
    found, *others_slopes, of_moved = outcome(of(others, there), others, gradient[order])
    compare([found, *others_slopes], [one[order] for one in (out, *slopes)], 1e-10)
    compare([of_moved[at]], [of_bias], 1e-10)


def test_the_gradient_of_a_bias_of_minus_infinity_is_zero_and_its_entry_is_gone():
    """Row 3 reads all tokens."""
    drawn = torch.randint(0, 10, (2, 30), generator=torch.Generator().manual_seed(0))
    known = pattern(torch.cat([drawn, torch.stack([torch.arange(10), torch.full((10,), 3)])], 1), 10)
    q, k, v = inputs(10, 2, 4)
    bias = torch.zeros(known.entries, 2, dtype=torch.float64)
    bias[known.matrix.rows == 3] = -torch.inf
    bias[0] = -torch.inf
    bias.requires_grad_()
    for plan in PLANS:
        out, *gradients = outcome(
            lambda p=plan: attention(q, k, v, known, bias=bias, plan=p), [q, k, v, bias], None or q.detach()
        )
        assert not out[3].any()
        assert all(bool(one.isfinite().all()) for one in gradients)
        assert not gradients[3][0].any()


def answered(q, k, v, known, plan, bias=None):
    """By `plan`, or as accelerators compute it."""
    if plan == "accelerator":
        return edge_attention.EdgeAttention.apply(q, k, v, bias, known.on(torch.device("cpu")))
    return attention(q, k, v, known, plan=plan, bias=bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("plan", ["edge", "block", "hybrid", "accelerator"])
def test_a_value_that_is_not_finite_reaches_those_that_attend_to_it_and_at_most_their_windows(plan, name, dtype):
    drawn = torch.randint(0, 70, (2, 100), generator=torch.Generator().manual_seed(0))
    wide = torch.stack([torch.full((12,), 9), torch.arange(16, 28)])  # a window of which twelve rows read one column
    hub = torch.stack([torch.arange(60), torch.full((60,), 40)])
    for edges, token in ((drawn, 5), (torch.cat([drawn, wide, hub], 1), 9)):
        known = pattern(edges, 70)
        rows = dict(zip("qkv", (one.detach() for one in inputs(known.tokens, 2, 4, dtype)), strict=True))
        rows[name][token] = torch.nan
        readers = known.dense()[:, token] if name != "q" else torch.arange(known.tokens) == token
        window = torch.zeros(80, dtype=torch.bool)
        window[: known.tokens] = readers
        reached = window.view(5, 16).any(1).repeat_interleave(16)[: known.tokens]
        assert 0 < int(readers.sum()) < known.tokens
        for one in rows.values():
            one.requires_grad_()
        out = answered(*rows.values(), known, plan)
        found = out.isnan().flatten(1)
        assert found[readers].all()
        allowed = readers if plan in {"edge", "accelerator"} or name == "q" else reached
        assert not found[~allowed].any()
        slopes, of_values = (one.isnan().flatten(1) for one in torch.autograd.grad(out.sum(), [rows["q"], rows["v"]]))
        assert slopes[readers].all()
        assert not slopes[~allowed].any()
        assert name == "v" or of_values[known.dense()[readers].any(0)].all()


@pytest.mark.parametrize("plan", ["edge", "block", "hybrid", "accelerator"])
def test_a_row_whose_bias_is_minus_infinity_everywhere_gives_zeros_unless_a_score_is_not_a_number(plan):
    known = made(40, 200)
    q, k, v = (one.detach() for one in inputs(40, 2, 4))
    q[7] = torch.nan
    bias = torch.zeros(known.entries, 2, dtype=torch.float64)
    bias[(known.matrix.rows == 6) | (known.matrix.rows == 7)] = -torch.inf
    found = answered(q, k, v, known, plan, bias)
    assert not found[6].any()
    assert found[7].isnan().all()
    assert not found[torch.arange(40) != 7].isnan().any()


@pytest.mark.parametrize("biased", [False, True])
def test_a_repeated_entry_is_one(biased):
    drawn = torch.randint(0, 40, (2, 300), generator=torch.Generator().manual_seed(5))
    columns, rows = torch.cat([torch.arange(40).expand(2, -1), drawn, drawn[:, :160]], 1)
    matrix = CSR.of(patterns.offsets(rows.numpy(), 40), columns[rows.argsort(stable=True)], (40, 40))
    known = Pattern.of(matrix)
    assert known.entries == int(known.dense().sum()) < matrix.entries
    leaves, gradient = inputs(40, 3, 5), torch.randn(40, 3, 5, dtype=torch.float64)
    places = (known.matrix.rows, known.matrix.indices.long())
    bias = torch.randn(known.entries, 3, dtype=torch.float64, requires_grad=True) if biased else None
    leaves += [bias] if biased else []

    def dense():
        mask = torch.full((40, 40, 3), -torch.inf, dtype=torch.float64)
        mask = mask.index_put(places, torch.zeros(known.entries, 3, dtype=torch.float64) if bias is None else bias)
        one, two, three = (each.transpose(0, 1) for each in leaves[:3])
        return functional.scaled_dot_product_attention(one, two, three, mask.permute(2, 0, 1)).transpose(0, 1)

    wanted = outcome(dense, leaves, gradient)
    for plan in PLANS:
        found = outcome(lambda p=plan: attention(*leaves[:3], known, bias=bias, plan=p), leaves, gradient)
        compare(found, wanted, 1e-10)
    with pytest.raises(UserError, match="a repeated one is there once"):
        attention(*leaves[:3], known, bias=torch.zeros(matrix.entries, 3, dtype=torch.float64))


class Elsewhere(torch.Tensor):
    """A tensor of a device from which NumPy and tensors of the processor are not reached, as a GPU's."""

    @staticmethod
    def __new__(cls, held):
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, held.stride(), dtype=held.dtype, device="meta")
        made.held = held
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        assert all(isinstance(one, cls) or not one.dim() for one in tensors), f"{func} of two devices"
        args, kwargs = tree_map_only(cls, lambda one: one.held, (args, kwargs or {}))
        found = func(*args, **kwargs)
        back = kwargs.get("device") == torch.device("cpu")
        return found if back else tree_map_only(torch.Tensor, cls, found)

    def numpy(self, *, force=False):
        raise TypeError("can't convert a device's tensor to numpy.")


def test_edges_of_another_device_make_the_pattern_of_their_copy_in_host_memory():
    edges, sizes = torch.randint(0, 4, (2, 30), generator=torch.Generator().manual_seed(0)), torch.tensor([4, 6])
    here = pattern(edges, 10, Additions(virtual=1, sizes=sizes))
    there = pattern(Elsewhere(edges), 10, Additions(virtual=1, sizes=Elsewhere(sizes)))
    for one, other in ((here.matrix.indptr, there.matrix.indptr), (here.matrix.indices, there.matrix.indices)):
        assert type(other) is torch.Tensor
        assert torch.equal(one, other)
    assert torch.equal(here.kinds, there.kinds)
    assert torch.equal(here.entry(*edges), there.entry(*map(Elsewhere, edges)))


def test_a_bias_finds_its_entries():
    known = pattern(torch.tensor([[0, 1, 2], [1, 2, 0]]), 3)
    at = known.entry([0, 1], [1, 2])
    assert known.matrix.rows[at].tolist() == [1, 2]
    assert known.matrix.indices[at].tolist() == [0, 1]
    with pytest.raises(UserError, match="no entry 2 -> 1"):
        known.entry([2], [1])


def test_counts_choose_windows_where_rows_read_the_same_columns():
    cliques = torch.block_diag(*[torch.ones(32, 32)] * 4)
    assert operator.by_counts(Pattern.of(csr_of(cliques))).name == "hybrid"
    assert operator.by_counts(made(400, 4000)).name == "edge"
    columns, entries = Pattern.of(csr_of(cliques)).dense_columns(1)
    assert (columns, entries) == (4 * 2 * 32, 4 * 32 * 32)


def test_windows_hold_each_entry_once():
    known = made(70, 900, Additions(virtual=1))
    for least in (1, 3, 6):
        windows = known.divided(least).by_row
        both = torch.cat([windows.entries, windows.rest_entries])
        assert sorted(both.tolist()) == list(range(known.entries))


def test_windows_are_found_again_in_the_cache_and_made_anew_where_they_are_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(patterns, "KEPT", 1)
    matrix, make = made(70, 900).matrix, patterns.windows_of
    expected = make(matrix, 3)

    def same():
        found = patterns.kept_windows(matrix, 3)
        assert all(map(torch.equal, found[:5], expected[:5]))
        assert torch.equal(found.rest.indptr, expected.rest.indptr)
        assert torch.equal(found.rest.indices, expected.rest.indices)
        assert torch.equal(found.rest_entries, expected.rest_entries)

    same()
    monkeypatch.setattr(patterns, "windows_of", None)
    same()
    with pytest.raises(TypeError):
        patterns.kept_windows(matrix, 4)
    monkeypatch.setattr(patterns, "windows_of", make)
    (place,) = (tmp_path / "espalier" / "windows").iterdir()
    place.write_bytes(place.read_bytes()[:100])
    same()


def test_what_a_pattern_adds():
    known = pattern(torch.tensor([[0], [1]]), 4, Additions(path=True, virtual=1, expander=1))
    dense = known.dense()
    assert dense.diagonal().all()
    assert dense[4].all()
    assert dense[:, 4].all()
    assert all(dense[i, i + 1] and dense[i + 1, i] for i in range(3))
    assert known.kinds[known.entry([0], [1])].item() == 1


@pytest.mark.parametrize("sizes", [None, torch.tensor([1, 5, 3])])
def test_virtual_tokens_attend_to_one_another_along_edges_as_in_full_attention(sizes):
    edges = torch.tensor([[0, 3], [0, 2]])
    known, complete = (pattern(edges, 9, Additions(virtual=3, sizes=sizes, complete=full)) for full in (False, True))
    owner = torch.zeros(9, dtype=torch.int64) if sizes is None else torch.repeat_interleave(torch.arange(3), sizes)
    graphs = 1 if sizes is None else 3
    owner = torch.cat([owner, torch.arange(graphs).repeat(3)])
    together = owner[:, None] == owner
    assert torch.equal(complete.dense(), together)
    assert torch.equal(known.dense()[9:], together[9:])
    assert torch.equal(known.dense()[:, 9:], together[:, 9:])
    rows, columns = known.matrix.rows, known.matrix.indices
    assert (known.kinds[(rows != columns) & ((rows >= 9) | (columns >= 9))] == 3).all()


@pytest.mark.parametrize("plan", ["edge", "block", "hybrid"])
@pytest.mark.parametrize(("world", "pieces"), [(1, [31]), (2, [20, 11]), (4, [9, 0, 15, 7])])
def test_any_number_of_ranks_equals_one(world, pieces, plan):
    """With gradients, also of a bias: each rank has that of its heads."""
    known = made(30, 160, Additions(virtual=1))
    q, k, v = inputs(31, 5, 8)  # 5 heads: uneven
    gradient = torch.randn_like(q)
    for biased in (False, True):
        bias = [torch.randn(known.entries, 5, dtype=torch.float64, requires_grad=True)] if biased else []
        wanted = outcome(
            lambda b=bias: attention(q, k, v, known, bias=b[0] if b else None, plan=plan), [q, k, v, *bias], gradient
        )

        def one(channel, bias=bias):
            rank, cut = channel.rank(), RankedAttention(known, pieces)
            own = [one.detach().split(pieces)[rank].clone().requires_grad_() for one in (q, k, v)]
            kept = [one.detach().clone().requires_grad_() for one in bias]
            out = functools.partial(cut, *own, bias=kept[0] if kept else None, plan=plan)
            return outcome(out, [*own, *kept], gradient.split(pieces)[rank])

        parts = ranks(world, one)
        compare([torch.cat(each) for each in list(zip(*parts, strict=True))[:4]], wanted[:4], 1e-10)
        if biased:
            compare([torch.stack([part[4] for part in parts]).sum(0)], wanted[4:], 1e-10)
            assert sum(bool(part[4].any()) for part in parts) == world


class Layer(nn.Module):
    """A layer as PyG's are called, on our operator, with the maps of `TransformerConv`."""

    def __init__(self, theirs, heads):
        super().__init__()
        self.maps = nn.ModuleList(copy.deepcopy(one) for one in (theirs.lin_query, theirs.lin_key, theirs.lin_value))
        self.heads = heads

    def forward(self, x, edge_index):
        q, k, v = (one(x).view(len(x), self.heads, -1) for one in self.maps)
        return graph.attention(q, k, v, pattern(edge_index, len(x), Additions(loops=False))).flatten(1)


def test_a_layer_of_a_pyg_model_trains_as_theirs():
    """One step of Adam: the same loss, and the same parameters after it."""
    theirs = pytest.importorskip("torch_geometric.nn")
    edges = torch.unique(torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(1)), dim=1)
    edges = edges[:, edges[0] != edges[1]]
    x, labels = torch.randn(50, 16), torch.arange(50) % 4
    kept = [theirs.TransformerConv(16, 4, heads=4, root_weight=False) for _ in range(2)]
    outcomes = []
    for layers in (kept, [Layer(one, 4) for one in kept]):
        steps = [(layers[0], "x, edge_index -> x"), nn.ReLU(), (layers[1], "x, edge_index -> x"), nn.Linear(16, 4)]
        torch.manual_seed(0)
        nn.init.normal_(steps[-1].weight)
        nn.init.zeros_(steps[-1].bias)
        model = theirs.Sequential("x, edge_index", steps)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            loss = functional.cross_entropy(model(x, edges), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        outcomes.append([*losses, model(x, edges).detach()])
    compare(*outcomes, 1e-4)
    assert outcomes[1][1] < outcomes[1][0]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda q, p: graph.attention(q, q, q[:3], p), "v is"),
        (lambda q, p: graph.attention(q[:3], q, q, p), "tokens"),
        (lambda q, p: graph.attention(q, q, q, p, plan="egde"), "edge"),
        (lambda q, p: graph.attention(q, q, q, p, bias=q[:, :, 0]), "bias is"),
        (lambda q, p: graph.attention(q.half(), q.half(), q.half(), p), "float"),
        (lambda q, p: pattern(torch.tensor([[0], [9]]), 5), "9"),
        (lambda q, p: pattern(torch.zeros(2, 0), 0), "at least one node"),
        (lambda q, p: Pattern.of(CSR.from_edges([[0], [1]], (2, 3))), "square"),
    ],
)
def test_bad_input_is_named(call, said):
    with pytest.raises(UserError, match=said):
        call(torch.randn(5, 2, 4), made(5, 9))
