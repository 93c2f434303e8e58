"""The accelerator: every question to a GPU's driver, through `torch.accelerator`. Elsewhere nothing names `torch.cuda`.

Espalier computes on processors and on devices that PyTorch calls `cuda` (NVIDIA's, and AMD's under ROCm). Another
accelerator of a machine (`mps`, `xpu`) is left alone: its kernels and collectives have not been tried.
"""

from __future__ import annotations

import os
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

KIND = "cuda"
CPU = torch.device("cpu")


def available() -> bool:
    """Whether there is one that Espalier computes on."""
    return count() > 0


def count() -> int:
    """How many there are. NVML counts them, which does not start the driver, so that ranks can be forked after:
    `torch.accelerator.is_available` starts it."""
    device = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if device is not None and device.type == KIND else 0


def of_rank(local_rank: int) -> torch.device:
    """Where a rank of this machine computes: its own accelerator, or the processor where there is none. A launcher may
    show each rank its own one only, which is number 0 then."""
    return torch.device(KIND, local_rank % count()) if count() else CPU


def is_on(where: Tensor | torch.device) -> bool:
    """Whether a tensor, or what is computed on a device, is on an accelerator."""
    return (where.device if isinstance(where, Tensor) else where).type == KIND


def begun() -> bool:
    """Whether this process has used one."""
    return bool(_module().is_initialized())


def current() -> torch.device:
    """The one that this process uses."""
    return torch.device(KIND, torch.accelerator.current_device_index())


def select(device: torch.device) -> None:
    """Makes it the current one of this process; the processor needs no such thing.

    Two runs of one seed then have the same bits: what has a deterministic form takes it. Convolutions in float32 are
    not rounded to TF32 unless that was asked for.
    """
    if is_on(device):
        torch.accelerator.set_device_index(device.index or 0)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # with other workspaces cuBLAS's sums vary
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        warnings.filterwarnings("ignore", ".*does not have a deterministic implementation", UserWarning)
        round_convolutions(False)


def round_convolutions(on: bool) -> None:
    """Whether convolutions round float32 to TF32, as PyTorch has them do."""
    torch.backends.cudnn.conv.fp32_precision = "tf32" if on else "ieee"  # type: ignore[attr-defined]


def selected(device: torch.device) -> AbstractContextManager[Any]:
    """Makes it the current one within a block."""
    return torch.accelerator.device_index(device.index or 0)


def synchronize(device: torch.device | None = None) -> None:
    """Waits until it has done what it was given."""
    torch.accelerator.synchronize(device)


def seed(value: int) -> None:
    """Seeds the current one's generator."""
    _module().manual_seed(value)


def generator_state() -> Tensor:
    """State of the current one's generator: [bytes], uint8."""
    return _module().get_rng_state()


def set_generator_state(state: Tensor) -> None:
    """Puts it back."""
    _module().set_rng_state(state)


def properties(device: torch.device | int) -> Any:
    """Its name, memory (bytes) and compute capability, as the driver says."""
    return _module().get_device_properties(device)


def has_bf16(device: torch.device) -> bool:
    """Whether its matrix units multiply bfloat16 (NVIDIA's from Ampere on)."""
    return is_on(device) and _module().get_device_capability(device) >= (8, 0)


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process had allocated there."""
    return int(torch.accelerator.max_memory_allocated(device))


def peak_reserved(device: torch.device) -> int:
    """Most bytes that PyTorch's allocator had of it for this process, allocated or free."""
    return int(torch.accelerator.max_memory_reserved(device))


def stream(device: torch.device) -> torch.Stream:
    """A new one."""
    return torch.Stream(device=device)


def current_stream(device: torch.device | None = None) -> torch.Stream:
    """The one on which operations are launched now."""
    return torch.accelerator.current_stream(device)


def timer() -> torch.Event:
    """An event that knows the milliseconds to another one (`elapsed_time`)."""
    return torch.Event(device=KIND, enable_timing=True)


def _module() -> Any:
    return torch.get_device_module(KIND)
