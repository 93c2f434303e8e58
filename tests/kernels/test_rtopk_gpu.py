"""The Triton form: in the interpreter it finds what torch finds; for real GPUs it compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from awkward import assert_right, hard_rows

from espalier.kernels.base import OPERATIONS

pytest.importorskip("triton")
ROW_TOPK = OPERATIONS["rtopk"]
PLAIN = [0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12]

# Whether Triton interprets is decided when it is imported, so the interpreter has a process of its own.
INTERPRETED = """
import sys
import torch
from awkward import assert_right, hard_rows
from espalier.kernels.base import OPERATIONS
from espalier.kernels.rtopk_gpu import select

dtype = getattr(torch, sys.argv[1])
for width, k in ((2, 1), (33, 32), (130, 44)):
    x = hard_rows(width, dtype)
    if dtype is torch.bfloat16:
        x[9] = 0  # the interpreter widens its subnormals wrongly
    assert_right(x, k, select(x, k, -1))
    plain = x[[0, 1, 2, 3, 4, 7, 8, 9, 10, 11, 12]]
    for steps in (1, 4):
        values, columns = select(plain, k, steps + 1)
        assert torch.equal(columns, OPERATIONS["rtopk"].reference.run(plain, k, steps, False)[1]), (width, k, steps)
        assert torch.equal(values.amax(-1), plain.amax(-1))
print("all right")
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_interpreted_kernel_is_exact_and_stops_where_the_reference_stops(dtype: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", INTERPRETED, dtype]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "all right\n", done.stderr


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_kernel_compiles_for_gpus(capability: int, dtype: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from espalier.kernels.rtopk_gpu import rtopk_rows

    pointers = {"x_ptr": f"*{dtype}", "values_ptr": f"*{dtype}", "columns_ptr": "*i64"}
    numbers = dict.fromkeys(("width", "k", "limit"), "i32")
    constants = {"BLOCK": 256, "EXACT": True}
    signature = {**pointers, **numbers, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(rtopk_rows, signature, constants)
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
    assert f".target sm_{capability}" in made.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "k"), [(2, 1), (33, 32), (100, 12), (257, 85), (1025, 64), (8192, 128)])
def test_kernel_is_exact_on_a_gpu(width: int, k: int, dtype: torch.dtype) -> None:
    x = hard_rows(width, dtype).cuda()
    run = next(form.run for form in ROW_TOPK.forms if form.device == "cuda")
    assert_right(x, k, run(x, k, None, False))
    assert_right(x, k, run(x, k, None, True), falling=True)
    plain = x[PLAIN]
    assert torch.equal(run(plain, k, 4, False)[1], ROW_TOPK.reference.run(plain, k, 4, False)[1])
