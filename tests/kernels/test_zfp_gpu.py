"""ZFP's Triton form: interpreted, it writes the CPU form's bytes and reads its values; for real GPUs it compiles.

No GPU was at hand: what runs here is the interpreter, and the compiler up to PTX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from espalier.kernels import zfp

pytest.importorskip("triton")

# Whether Triton interprets is decided when it is imported, so the interpreter has a process of its own.
INTERPRETED = """
import sys
import torch
from espalier.kernels import zfp
from test_zfp import values

(pack,), (unpack,) = ([form.run for form in one.forms if form.device == "cuda"] for one in (zfp.pack, zfp.unpack))
for rate in [float(sys.argv[1])]:
    for length in (0, 1, 2, 3, 517):
        for style in range(4 if length > 3 else 1):
            x = torch.from_numpy(values(length, style))
            stream = zfp.pack(x, rate)
            assert torch.equal(pack(x, rate), stream), (rate, length, style)
            assert torch.equal(unpack(stream, rate, length), zfp.unpack(stream, rate, length)), (rate, length, style)
    for bad in ("nan", "inf", "-inf"):
        x = torch.zeros(9)
        x[8] = float(bad)
        assert pack(x, rate) is None
print("all right")
"""


@pytest.mark.parametrize(
    "rate", ["5.3", *(pytest.param(one, marks=pytest.mark.slow) for one in ("2.25", "8", "16", "16.5", "24", "32"))]
)
def test_interpreted_kernels_write_and_read_the_cpus_bytes(rate: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", INTERPRETED, rate]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "all right\n", done.stderr


@pytest.mark.parametrize(
    "size", [32, pytest.param(9, marks=pytest.mark.slow), pytest.param(128, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_for_gpus(capability: int, size: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from espalier.kernels import zfp_gpu

    packing = {"x_ptr": "*fp32", "table_ptr": "*i32", "words_ptr": "*i32", "bad_ptr": "*u8"}
    unpacking = {"words_ptr": "*i64", "tables_ptr": "*i64", "out_ptr": "*fp32"}
    packing |= {"length": "i32", "blocks": "i32"}
    unpacking |= {"length": "i32", "last": "i32"}
    constants = {"BITS": size, "LANES": zfp_gpu.LANES}
    for kernel, arguments in ((zfp_gpu.pack_blocks, packing), (zfp_gpu.unpack_blocks, unpacking)):
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature, constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        assert f".target sm_{capability}" in made.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("rate", [2.25, 5.3, 8, 16, 32])
def test_kernels_write_and_read_the_cpus_bytes_on_a_gpu(rate: float) -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(1))
    stream, mine = zfp.pack(x, rate), zfp.pack(x.cuda(), rate)
    assert stream is not None
    assert mine is not None
    assert torch.equal(mine.cpu(), stream)
    assert torch.equal(zfp.unpack(stream.cuda(), rate, len(x)).cpu(), zfp.unpack(stream, rate, len(x)))
