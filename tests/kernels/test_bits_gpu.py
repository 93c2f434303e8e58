"""The Triton form of few bits for a value: interpreted, it writes the CPU form's bytes; for real GPUs it compiles.

No GPU was at hand: what runs here is the interpreter, and the compiler up to PTX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from espalier.kernels import bits

pytest.importorskip("triton")

# Whether Triton interprets is decided when it is imported, so the interpreter has a process of its own. There the form
# for CUDA is put in place of the one for CPUs, so that what calls it (codec, collective) is tested too.
INTERPRETED = """
import torch
from test_bits import values
from espalier.comm import Traffic, codec, traffic
from espalier.comm.base import feedback
from espalier.kernels import bits
from many_ranks import forks  # the interpreter bears one thread
import torch.distributed as dist

on_gpu = {}
for one in (bits.pack, bits.unpack):
    (form,) = [form for form in one.forms if form.device == "cuda"]
    on_gpu[one.name] = form.run
pack, unpack = on_gpu["lowbit_pack"], on_gpu["lowbit_unpack"]

for width in bits.BITS:
    for length, key in ((0, -1), (1, 1), (7, 0), (255, -1), (257, 12345), (511, 2**32 - 1), (1800, -1), (1800, 7)):
        x = values(length, length)
        x[:300:7] = torch.finfo(torch.float32).max
        mine, plain = pack(x, width, key), bits.pack(x, width, key)
        assert torch.equal(mine[0], plain[0]), (width, length, key)
        assert torch.equal(mine[1], plain[1]), (width, length, key)
        back = unpack(*mine, width, length)
        assert torch.equal(back, bits.unpack(*plain, width, length)), (width, length)
    for place in (0, 256, 299):
        for bad in ("nan", "inf", "-inf"):
            x = torch.zeros(300)
            x[place] = float(bad)
            assert pack(x, width, -1) is None


def summed(channel):
    channel.use(Traffic.GRADIENTS, codec("int8"))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(channel.rank()))
    residual = torch.zeros(5000)
    with traffic(Traffic.GRADIENTS), feedback(residual):
        dist.all_reduce(x)
    return x, residual


torch.set_num_threads(1)
plain = forks(2, summed)
bits.pack.forms[:], bits.unpack.forms[:] = [], []
bits.pack.fast("cpu")(pack)
bits.unpack.fast("cpu")(unpack)
for mine, theirs in zip(forks(2, summed), plain):
    assert torch.equal(mine[0], theirs[0])
    assert torch.equal(mine[1], theirs[1])
print("all right")
"""


def test_interpreted_kernels_write_the_cpus_bytes_and_sums_through_them_have_the_same_bits() -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    masked = "ignore:overflow encountered:RuntimeWarning"  # of lanes behind the end, which a GPU computes too
    command = [sys.executable, "-W", "error", "-W", masked, "-c", INTERPRETED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "all right\n", done.stderr


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
@pytest.mark.parametrize("width", bits.BITS)
def test_kernels_compile_for_gpus(capability: int, width: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from espalier.kernels import bits_gpu

    packing = {"x_ptr": "*fp32", "scales_ptr": "*fp32", "codes_ptr": "*u8", "bad_ptr": "*u8"}
    packing |= {"length": "i32", "key": "i64", "ceiling": "fp32"}
    unpacking = {"scales_ptr": "*fp32", "codes_ptr": "*u8", "values_ptr": "*fp32", "length": "i32"}
    for kernel, arguments, constants in (
        (bits_gpu.pack_blocks, packing, {"BITS": width, "DRAWN": False, "EACH": bits_gpu.EACH[width]}),
        (bits_gpu.pack_blocks, packing, {"BITS": width, "DRAWN": True, "EACH": bits_gpu.EACH[width]}),
        (bits_gpu.unpack_blocks, unpacking, {"BITS": width}),
    ):
        signature = {**arguments, **dict.fromkeys(constants, "constexpr")}
        source = ASTSource(kernel, signature, constants)
        made = compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        assert f".target sm_{capability}" in made.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("width", bits.BITS)
@pytest.mark.parametrize("key", [bits.NEAREST, 12345])
def test_kernels_write_the_cpus_bytes_on_a_gpu(width: int, key: int) -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(1))
    plain, mine = bits.pack(x, width, key), bits.pack(x.cuda(), width, key)
    assert plain is not None
    assert mine is not None
    torch.testing.assert_close(mine[0].cpu(), plain[0], rtol=1e-6 if width == 1 else 0, atol=0)
    assert torch.equal(mine[1].cpu(), plain[1])
    back = bits.unpack(*(one.cuda() for one in plain), width, len(x))
    assert torch.equal(back.cpu(), bits.unpack(*plain, width, len(x)))
