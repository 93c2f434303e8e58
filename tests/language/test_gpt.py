"""The decoder: its parts equal PyTorch's plain forms, cache and recomputation change nothing, work is counted."""

from __future__ import annotations

import copy
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from espalier import recipe as config
from espalier.language import elementwise, gpt, moe
from espalier.language.kv_cache import Cache
from espalier.language.operation_counts import DecoderLoad
from espalier.recipe import decoder_shapes, defaults

SMALL = {"depth": 2, "width": 48, "heads": 4, "feed_forward": 72, "vocabulary": 61, "context": 24}
MODES = ["none", "selective", "block"]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(kind=config.Gpt, **changes):
    return defaults.resolve(config.Recipe(model=kind(**{**SMALL, **changes})))[0].model


def made(chosen, dtype=torch.float64, seed=1) -> gpt.GPT:
    model = moe.MOE(chosen) if isinstance(chosen, config.Moe) else gpt.GPT(chosen)
    gpt.initialise(model, seed)
    return model.to(dtype)


def tokens(batch=3, seq=24, vocabulary=61, seed=0) -> torch.Tensor:
    return torch.randint(vocabulary, (batch, seq), generator=torch.Generator().manual_seed(seed))


def gradients(model, *batch) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model.loss_sum(*batch).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- parts -------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 7), width=st.integers(1, 33), seed=st.integers(0, 99))
def test_rms_norm_equals_pytorch_in_output_and_gradients(rows, width, seed):
    torch.manual_seed(seed)
    x = torch.randn(2, rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(width, dtype=torch.float64, requires_grad=True)
    same(lambda: elementwise.rms_norm(x, weight, 1e-5), lambda: F.rms_norm(x, (width,), weight, 1e-5), [x, weight])


@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 7), width=st.integers(1, 33), seed=st.integers(0, 99))
def test_swiglu_equals_pytorch_in_output_and_gradients(rows, width, seed):
    torch.manual_seed(seed)
    gate, up = (torch.randn(2, rows, width, dtype=torch.float64, requires_grad=True) for _ in range(2))
    same(lambda: elementwise.swiglu(gate, up), lambda: F.silu(gate) * up, [gate, up])


def test_rotation_equals_its_plain_form_in_output_and_gradients():
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = (torch.randn(5, 4, dtype=torch.float64) for _ in range(2))

    def plain():
        a, b = x.chunk(2, -1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    same(lambda: elementwise.rotate(x, cos, sin), plain, [x])


def same(ours, plain, inputs) -> None:
    left, right = ours(), plain()
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    pull = torch.randn_like(left)
    torch.testing.assert_close(
        torch.autograd.grad(left, inputs, pull), torch.autograd.grad(right, inputs, pull), rtol=1e-11, atol=1e-11
    )


def test_elementwise_gradients_agree_with_finite_differences():
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: elementwise.rms_norm(x, w, 1e-5), (x, weight))
    assert torch.autograd.gradcheck(elementwise.swiglu, (x, x.detach().clone().requires_grad_()))


def test_attention_depends_on_distances_only():
    chosen = options(depth=1)
    model = made(chosen)
    turn = model.rotation(gpt.Where(torch.arange(24)))
    rows = torch.randn(1, 1, 1, 12, dtype=torch.float64).expand(1, 24, 1, 12)
    turned = elementwise.rotate(rows.contiguous(), turn.cos, turn.sin)[0, :, 0]
    products = turned @ turned.T
    for distance in (1, 5, 20):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_no_token_sees_a_later_one(kv_heads):
    model, batch = made(options(kv_heads=kv_heads)), tokens(1)
    changed = batch.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 61
    with torch.no_grad():
        before, after = model(batch), model(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.equal(before[:, 10:], after[:, 10:])


def test_grouped_attention_equals_full_attention_with_repeated_heads():
    grouped, full = made(options(kv_heads=2)), made(options(kv_heads=4))
    state = grouped.state_dict()
    for name in [name for name in state if "attention.key" in name or "attention.value" in name]:
        state[name] = state[name].view(2, 12, 48).repeat_interleave(2, 0).reshape(48, 48)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()))


# --- the whole ---------------------------------------------------------------------------------------------------


CASES = [(config.Gpt, name) for name in (None, *decoder_shapes.SHAPES)] + [
    (config.Moe, None),
    (config.Moe, "gpt2-124m"),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_parameter_count_equals_the_built_model(kind, name):
    size = {"shape": name} if name else SMALL
    chosen = defaults.resolve(config.Recipe(model=kind(**size)))[0].model
    begun = time.process_time()
    with torch.device("meta"):
        model = moe.MOE(chosen) if kind is config.Moe else gpt.GPT(chosen)
    assert sum(parameter.numel() for parameter in model.parameters()) == decoder_shapes.parameter_count(chosen)
    assert time.process_time() - begun < 10


@settings(max_examples=15, deadline=None)
@given(heads=st.sampled_from([(2, 1), (2, 2), (6, 3)]), depth=st.integers(1, 3), tied=st.booleans())
def test_parameter_count_equals_the_built_model_at_any_size(heads, depth, tied):
    chosen = options(depth=depth, heads=heads[0], kv_heads=heads[1], tied=tied)
    with torch.device("meta"):
        model = gpt.GPT(chosen)
    assert sum(parameter.numel() for parameter in model.parameters()) == decoder_shapes.parameter_count(chosen)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_moved_from_the_meta_device_equals_one_built_in_place(tied):
    chosen = options(tied=tied)
    with torch.device("meta"):
        moved = gpt.GPT(chosen)
    moved = moved.to_empty(device="cpu")
    gpt.initialise(moved, 7)
    assert torch.equal(moved(tokens()), made(chosen, torch.float32, seed=7)(tokens()))


def test_initial_weights_depend_on_seed_and_name_only():
    one, again, other = (made(options(depth=depth), seed=seed) for depth, seed in ((2, 1), (3, 1), (2, 2)))
    assert torch.equal(one.embedding.weight, again.embedding.weight)
    assert not torch.equal(one.embedding.weight, other.embedding.weight)
    assert not torch.equal(one.blocks[0].attention.key.weight, one.blocks[1].attention.key.weight)


def test_residual_matrices_start_smaller_with_depth():
    model = made(options(depth=8, width=192, heads=3))
    assert model.blocks[0].attention.query.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for matrix in (model.blocks[3].attention.out, model.blocks[5].feed_forward.down):
        assert matrix.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_the_loss_is_the_sum_of_cross_entropies_and_skips_ignored_targets():
    model, batch, targets = made(options()), tokens(), tokens(seed=1)
    targets[0, 5:] = gpt.IGNORED
    rows = F.log_softmax(model(batch), -1)
    kept = targets != gpt.IGNORED
    wanted = -sum(rows[b, s, targets[b, s]] for b, s in kept.nonzero().tolist())
    torch.testing.assert_close(model.loss_sum(batch, targets), wanted)


def test_the_loss_and_its_gradients_add_up_over_micro_batches():
    model, batch, targets = made(options()), tokens(4), tokens(4, seed=1)
    whole = gradients(model, batch, targets)
    parts = [gradients(model, batch[cut], targets[cut]) for cut in (slice(0, 1), slice(1, 4))]
    for name in whole:
        torch.testing.assert_close(whole[name], parts[0][name] + parts[1][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
@pytest.mark.parametrize("mode", MODES[1:])
def test_recomputation_changes_no_gradient(kind, mode):
    model, batch = made(options(kind)), (tokens(), tokens(seed=1))
    plain = gradients(model, *batch)
    gpt.recompute(model, mode)
    again = gradients(model, *batch)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    with torch.no_grad():
        model(batch[0])


def test_a_copied_model_recomputes_its_own_blocks():
    model = made(options())
    gpt.recompute(model, "block")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.blocks[0].attention.out.weight.zero_()
    assert not torch.equal(model(tokens()), twin(tokens()))


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
@pytest.mark.parametrize("cut", [[24], [1] * 24, [5, 1, 1, 9, 8]])
def test_forward_with_a_cache_equals_forward_without(kind, cut):
    model, batch = made(options(kind, kv_heads=2)), tokens()
    cache, parts, start = Cache(2), [], 0
    with torch.no_grad():
        whole = model(batch)
        for length in cut:
            parts.append(model(batch[:, start : start + length], cache))
            start += length
            assert cache.length == start
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


def test_attend_can_be_replaced():
    model, calls = made(options()), []

    def attend(query, key, value, where):
        calls.append((query.shape, key.shape))
        assert where.positions.tolist() == list(range(24))
        return gpt.causal(query, key, value, where)

    plain = model(tokens())
    for block in model.blocks:
        block.attention.attend = attend
    assert torch.equal(model(tokens()), plain)
    assert calls == [((3, 4, 24, 12), (3, 4, 24, 12))] * 2


# --- work --------------------------------------------------------------------------------------------------------


def written_out(query, key, value, where):
    """Causal attention as two products of the whole square, which PyTorch's counter sees."""
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(
        torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).triu(1), -torch.inf
    )
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
def test_work_counts_the_flops_pytorch_counts(kind):
    chosen = options(kind, kv_heads=2)
    model, batch = made(chosen), (tokens(), tokens(seed=1))
    fused = model(batch[0])
    for block in model.blocks:
        block.attention.attend = written_out
    work = (
        (moe if kind is config.Moe else gpt)
        .work(DecoderLoad(decoder_shapes.sizes(chosen), 24, 3, "none", "fp64"))
        .whole
    )
    with FlopCounterMode(display=False) as counter:
        torch.testing.assert_close(model(batch[0]), fused)
    # PyTorch counts the whole square of causal attention, we take half of it.
    assert counter.get_total_flops() == work.forward_flops + work.attention


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
@pytest.mark.parametrize("mode", MODES)
def test_work_says_which_share_of_forward_is_repeated(kind, mode):
    chosen = options(kind)
    model, batch = made(chosen, torch.float32), (tokens(), tokens(seed=1))
    gpt.recompute(model, mode)
    work = (
        (moe if kind is config.Moe else gpt).work(DecoderLoad(decoder_shapes.sizes(chosen), 24, 3, mode, "fp32")).whole
    )
    square = 2 * 3 * 4 * 24 * 24 * 12  # one product of the square of one layer
    cores = {  # PyTorch's counter does not know the CPU's fused attention; half of each square, as above
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda *_, **__: square,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda *_, **__: square * 5 // 2,
    }
    with FlopCounterMode(display=False, custom_mapping=cores) as forward:
        loss = model.loss_sum(*batch)
    with FlopCounterMode(display=False, custom_mapping=cores) as backward:
        loss.backward()
    assert forward.get_total_flops() == work.forward_flops
    products = sum(product.flops for product in work.products)
    norms = 5 * 2 * 72 * 48  # the gradient of each norm's weight is written as a product
    repeated = backward.get_total_flops() - 2 * products - 2.5 * work.attention - norms
    assert repeated == pytest.approx(work.again * work.forward_flops, rel=1e-9)


class Live(TorchDispatchMode):
    """Bytes of the tensors made inside and still alive, parameters and inputs left out; `peak` is their most."""

    def __init__(self, known) -> None:
        super().__init__()
        self.known = [StorageWeakRef(tensor.untyped_storage()) for tensor in known]
        self.left_out = {reference.cdata for reference in self.known}
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                reference = StorageWeakRef(leaf.untyped_storage())
                if reference.cdata not in self.left_out:
                    self.made[reference.cdata] = (reference, leaf.untyped_storage().nbytes())
        self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self.made = {key: value for key, value in self.made.items() if not value[0].expired()}
        return sum(size for _, size in self.made.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("kind", "changes", "dtype"),
    [
        (config.Gpt, {}, torch.float32),
        (config.Gpt, {"kv_heads": 2, "tied": True}, torch.float64),
        (config.Gpt, {"vocabulary": 2000}, torch.float32),
        (config.Moe, {"experts": 4}, torch.float32),
    ],
)
def test_work_counts_the_bytes_that_are_kept_and_the_peak(kind, changes, dtype, mode):
    chosen = options(kind, depth=3, width=64, **changes)
    model = made(chosen, dtype)
    gpt.recompute(model, mode)
    batch, targets = tokens(4), tokens(4, seed=1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    grads = [parameter.grad for parameter in model.parameters()]
    precision = {torch.float32: "fp32", torch.float64: "fp64"}[dtype]
    work = (
        (moe if kind is config.Moe else gpt)
        .work(DecoderLoad(decoder_shapes.sizes(chosen), 24, 4, mode, precision))
        .whole
    )
    with Live([*model.parameters(), *grads, *model.buffers(), batch, targets]) as live:
        loss = model.loss_sum(batch, targets)
        log_softmax = 4 * 24 * chosen.vocabulary * dtype.itemsize
        kept = live.now() - log_softmax
        loss.backward()
    assert work.saved == pytest.approx(kept, rel=0.05)
    # A matrix's fresh gradient exists beside the one it is added to.
    assert work.saved + work.transient == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize("mode", MODES)
def test_bf16_keeps_what_work_says(mode):
    chosen = options(depth=3, width=64)
    model = made(chosen, torch.float32)
    gpt.recompute(model, mode)
    batch, targets = tokens(4), tokens(4, seed=1)
    work = gpt.work(DecoderLoad(decoder_shapes.sizes(chosen), 24, 4, mode, "bf16")).whole
    with Live([*model.parameters(), *model.buffers(), batch, targets]) as live, torch.autocast("cpu", torch.bfloat16):
        loss = model.loss_sum(batch, targets)
    copied = [model.head.weight]  # autocast's copies of the weights live as long as something kept needs them
    if mode == "none":
        copied += [parameter for parameter in model.blocks.parameters() if parameter.dim() == 2]
    kept = live.now() - 4 * 24 * 61 * 4 - 2 * sum(parameter.numel() for parameter in copied)
    assert loss.isfinite()
    assert work.saved == pytest.approx(kept, rel=0.05)


@pytest.mark.parametrize("kind", [config.Gpt, config.Moe])
@pytest.mark.parametrize("mode", MODES)
def test_work_takes_arrays_of_micro_batches(kind, mode):
    chosen, module = options(kind), moe if kind is config.Moe else gpt
    many = module.work(DecoderLoad(decoder_shapes.sizes(chosen), 24, np.array([1, 2, 8]), mode, "bf16")).whole
    for index, size in enumerate((1, 2, 8)):
        one = module.work(DecoderLoad(decoder_shapes.sizes(chosen), 24, size, mode, "bf16")).whole
        for field in ("attention", "moved", "saved", "transient", "forward_flops", "samples", "tokens"):
            assert getattr(many, field)[index] == getattr(one, field)
        assert many.again[index] == one.again
