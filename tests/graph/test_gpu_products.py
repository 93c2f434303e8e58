"""Sums over a graph on a GPU: the forms agree, the faster is remembered, and a plan promises none that no run takes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from asked import gpus, processor

from clique_graphs import cliques, workload_of
from espalier.graph.networks import base, compiled_aggregate, gpu_products
from espalier.graph.networks.base import Forms, MessageBlock
from espalier.parallel.workload import to_device
from espalier.plan.decide import decide
from espalier.sparse import CBM
from espalier.train import request_from_recipe


def block_of(nodes=300, weighted=False, scaled=True):
    """A directed graph with nodes that no edge leads to."""
    random = torch.Generator().manual_seed(0)
    dense = torch.rand(nodes, nodes, generator=random) < 0.1
    dense[::7] = False
    targets, sources = dense.nonzero(as_tuple=True)
    indptr = torch.zeros(nodes + 1, dtype=torch.int64)
    indptr[1:] = torch.bincount(targets, minlength=nodes).cumsum(0)
    factors = (torch.rand(nodes, generator=random) if scaled else None for _ in range(2))
    weights = torch.rand(len(sources), generator=random) if weighted else None
    return MessageBlock(indptr, sources.int(), nodes, Forms(), weights, *factors)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_torch_sparse_sums_what_gathered_messages_sum(weighted, scaled, started, monkeypatch):
    monkeypatch.setattr(gpu_products, "SMALL", 0)
    monkeypatch.setattr(gpu_products, "fastest", lambda *_: "torch.sparse")
    block = block_of(weighted=weighted, scaled=scaled)
    rows = torch.randn(300, 9, requires_grad=True)
    start = torch.randn(9, requires_grad=True) if started else None
    inputs = (rows, start) if started else (rows,)
    ours = gpu_products.product(block, rows, start, compiled_aggregate.matrix(block))
    plain = base.aggregate(block, rows, start)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    seed = torch.randn_like(plain)
    for mine, theirs in zip(torch.autograd.grad(ours, inputs, seed), torch.autograd.grad(plain, inputs, seed)):  # noqa: B905
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_its_gradients_are_right_twice():
    block = block_of(12)
    matrix = compiled_aggregate.matrix(block._replace(left=block.left.double(), right=block.right.double()))
    rows = torch.randn(12, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gpu_products.TorchProduct.apply(matrix, x), (rows,))
    assert torch.autograd.gradgradcheck(lambda x: gpu_products.TorchProduct.apply(matrix, x), (rows,))


def test_the_faster_form_is_measured_once_and_taken_again_whatever_the_clock_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    block, clock = block_of(), {"gathered": 2.0, "torch.sparse": 1.0}
    timed = []

    def timer(statement, globals):
        assert statement == gpu_products.BOTH_WAYS
        exec(statement, dict(globals))
        timed.append("gathered" if globals["form"].func is base.aggregate else "torch.sparse")
        return SimpleNamespace(timeit=lambda turns: SimpleNamespace(mean=clock[timed[-1]]))

    monkeypatch.setattr(gpu_products, "Timer", timer)
    matrix = compiled_aggregate.matrix(block)
    with torch.no_grad():
        assert gpu_products.fastest(block, torch.randn(300, 9), matrix) == "torch.sparse"
    clock["torch.sparse"] = 3.0
    assert gpu_products.fastest(block, torch.randn(300, 9), matrix) == "torch.sparse"
    assert timed == ["gathered", "torch.sparse"]
    assert gpu_products.fastest(block, torch.randn(300, 8), matrix) == "gathered"


def test_a_clock_measures_both(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    block = block_of()
    assert gpu_products.fastest(block, torch.randn(300, 9), compiled_aggregate.matrix(block)) in (
        "gathered",
        "torch.sparse",
    )


def test_few_messages_are_gathered_without_being_measured(monkeypatch):
    monkeypatch.setattr(gpu_products, "fastest", lambda *_: pytest.fail("it was measured"))
    block, rows = block_of(), torch.randn(300, 9)
    assert torch.equal(gpu_products.product(block, rows, None, None), base.aggregate(block, rows))


def whole(recipe_format):
    """A run over a graph of cliques, and its block after the plan's decisions were made."""
    workload = workload_of(cliques(9, 40), format=recipe_format)
    workload.decisions()
    return workload, workload.task.train.block


@pytest.mark.parametrize(("wanted", "on_cpu"), [("auto", "cbm"), ("cbm", "cbm"), ("csr", "csr")])
def test_what_a_run_takes_on_a_gpu_is_never_what_is_compressed(wanted, on_cpu, monkeypatch):
    _, block = whole(wanted)
    assert compiled_aggregate.form_on(block, "cpu") == on_cpu
    assert compiled_aggregate.form_on(block, "cuda") == "measured"
    assert compiled_aggregate.form_on(block_of(), "cuda") == "gathered", "drawn anew at every step"
    taken = []
    monkeypatch.setattr(compiled_aggregate, "form_on", lambda block, kind: "measured")
    monkeypatch.setattr(gpu_products, "product", lambda block, rows, *rest: taken.append("measured") or rows)
    monkeypatch.setattr(CBM, "product", lambda self, x: pytest.fail("compressed"))
    compiled_aggregate.aggregate(block, torch.randn(360, 4, requires_grad=True))
    assert taken == ["measured"]


@pytest.mark.parametrize("wanted", ["auto", "cbm", "csr"])
def test_a_plan_promises_cbm_on_processors_alone(wanted):
    workload, _ = whole(wanted)
    request = request_from_recipe.of_recipe(workload.recipe, lambda: workload)
    (processors,) = [remark for remark in request.profile.remarks if remark.startswith("Format: ")]
    assert processors.startswith("Format: CSR" if wanted == "csr" else "Format: CBM, ")
    assert decide(request, processor()).plan.why.count(processors) == 1
    on_gpus = decide(request, gpus(devices=1)).plan
    assert on_gpus.ranks[0].device != "cpu"
    assert gpu_products.SENTENCE in on_gpus.why
    assert processors not in on_gpus.why


def test_a_compressed_matrix_says_that_its_kernels_are_for_processors():
    compressed = CBM.of(compiled_aggregate.matrix(whole("cbm")[1]), 0)
    with pytest.raises(Exception, match="for processors; x is on meta"):
        compressed.matmul(torch.ones(360, 2, device="meta"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("form", ["gathered", "torch.sparse"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_forms_on_a_gpu_sum_what_the_processor_sums(form, dtype, monkeypatch):
    monkeypatch.setattr(gpu_products, "SMALL", 0)
    monkeypatch.setattr(gpu_products, "fastest", lambda *_: form)
    here = to_device(block_of(), torch.device("cpu"), dtype)
    there = to_device(block_of(), torch.device("cuda"), dtype)
    rows = torch.randn(300, 64, dtype=dtype, requires_grad=True)
    rows_there = rows.detach().cuda().requires_grad_()
    plain = base.aggregate(here, rows)
    sums = gpu_products.product(there, rows_there, None, compiled_aggregate.matrix(there))
    torch.testing.assert_close(sums.cpu(), plain, rtol=1e-5, atol=1e-5)
    gradient = torch.autograd.grad(sums, rows_there, torch.ones_like(sums))[0]
    torch.testing.assert_close(gradient.cpu(), torch.autograd.grad(plain, rows, torch.ones_like(plain))[0])
