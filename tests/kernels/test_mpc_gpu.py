"""MPC's Triton form: interpreted, it writes the CPU form's bytes and reads them; for real GPUs it compiles.

No GPU was at hand: what runs here is the interpreter, and the compiler up to PTX.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from espalier.kernels import mpc

pytest.importorskip("triton")

# Whether Triton interprets is decided when it is imported, so the interpreter has a process of its own.
INTERPRETED = """
import sys
import torch
from espalier.recipe.errors import UserError
from espalier.kernels import mpc
from test_mpc import words

(pack,), (unpack,) = ([form.run for form in one.forms if form.device == "cuda"] for one in (mpc.pack, mpc.unpack))
widths, records, lengths = (list(map(int, one.split(","))) for one in sys.argv[1:4])
for width in widths:
    for dims in records:
        for index, length in enumerate(lengths):
            for seed in range(3) if length == 1025 else [index]:
                given = words(length, width, seed)
                stream = mpc.pack(given, dims)
                assert torch.equal(pack(given, dims), stream), (width, dims, length, seed)
                assert torch.equal(unpack(stream, width), given), (width, dims, length, seed)
    nothing = torch.zeros(1100, dtype=mpc.WORDS[width])
    assert torch.equal(pack(nothing, dims), mpc.pack(nothing, dims))
    assert torch.equal(unpack(pack(nothing, dims), width), nothing)
    odd = torch.empty(len(stream) + 1, dtype=torch.uint8)[1:].copy_(stream)
    assert torch.equal(unpack(odd, width), given)
    bitmap = stream.clone()
    bitmap[8] ^= 1
    for bad in (stream[:-width], torch.cat([stream, stream[:width]]), stream[:7], stream[4:], bitmap):
        try:
            unpack(bad, width)
        except UserError as error:
            assert "MPC stream" in str(error)
        else:
            raise AssertionError(len(bad))
print("all right")
"""
LENGTHS = "0,1,2,15,16,17,32,33,63,64,65,127,1000,1023,1024,1025,2050,2500"


@pytest.mark.parametrize(
    ("widths", "dims", "lengths"),
    [
        ("2,4,8", "1,7", "0,17,1025,2100"),
        *(
            pytest.param(width, dims, lengths, marks=pytest.mark.slow)
            for width in ("2", "4", "8")
            for dims, lengths in (("1,2,31", LENGTHS), (",".join(map(str, range(3, 33))), "1025"))
        ),
    ],
)
def test_interpreted_kernels_write_and_read_the_cpus_bytes(widths: str, dims: str, lengths: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", INTERPRETED, widths, dims, lengths]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.stdout == "all right\n", done.stderr


@pytest.mark.parametrize("bits", [32, *(pytest.param(one, marks=pytest.mark.slow) for one in (16, 64))])
@pytest.mark.parametrize("dims", [7, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2, 32))])
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_for_gpus(capability: int, dims: int, bits: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.runtime.jit import JITFunction

    from espalier.kernels import mpc_gpu

    word = f"*i{bits}"
    lanes = 1 << (dims - 1).bit_length()
    kernels: dict[JITFunction, dict[str, str | int]] = {
        mpc_gpu.pack_chunks: {
            **dict.fromkeys(("words_ptr", "s_ptr", "marks_ptr"), word),
            "counts_ptr": "*i64",
            "length": "i64",
            "dims": "i32",
            "BITS": bits,
        },
        mpc_gpu.keep_chunks: {"s_ptr": word, "ends_ptr": "*i64", "kept_ptr": word},
        mpc_gpu.count_chunks: {"marks_ptr": word, "counts_ptr": "*i64", "tiles": "i32", "BITS": bits},
        mpc_gpu.unpack_chunks: {
            "marks_ptr": word,
            "ends_ptr": "*i64",
            **dict.fromkeys(("kept_ptr", "words_ptr"), word),
            **dict.fromkeys(("length", "tiles"), "i32"),
            **{"BITS": bits, "DIMS": dims, "LANES": lanes},
        },
    }
    for kernel, arguments in kernels.items():
        constants = {name: value for name, value in arguments.items() if isinstance(value, int)}
        signature = {name: "constexpr" if name in constants else value for name, value in arguments.items()}
        source, target = ASTSource(kernel, signature, constants), GPUTarget("cuda", capability, 32)
        made = compile(source, target=target, options={"enable_fp_fusion": False})
        assert f".target sm_{capability}" in made.asm["ptx"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("dims", [1, 2, 7, 32])
def test_kernels_write_and_read_the_cpus_bytes_on_a_gpu(width: int, dims: int) -> None:
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    noise = torch.randint(-(2**15), 2**15, (100_001,), generator=torch.Generator().manual_seed(1)).to(signed)
    for given in (noise, torch.arange(100_001).to(signed), torch.where(noise < 30_000, 0, noise)):
        words = given.view(mpc.WORDS[width])
        stream = mpc.pack(words, dims)
        assert torch.equal(mpc.pack(words.cuda(), dims).cpu(), stream)
        assert torch.equal(mpc.unpack(stream.cuda(), width).cpu(), words)
