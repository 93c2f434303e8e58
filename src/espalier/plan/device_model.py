"""Device model: seconds of products, attention and memory traffic, from measurements or a datasheet.

Measured devices: FLOP/s between the measured shapes and settings by inverse-distance weights in log space, so that a
measured shape gives its measured time. Devices of the catalogue: tiles in waves over multiprocessors, beside what they
read and write. Both take NumPy arrays. Loads no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from espalier.machine import cluster as clusters
from espalier.machine.cluster import Device
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.recipe.cost import VALUE_BYTES, Number, Product, Work
from espalier.recipe.errors import UserError

PRODUCT_SHARE = 0.8
"""Share of a datasheet's peak that a large product reaches: cuBLAS on an A100 gives about 250 of 312 TFLOP/s. Assumed
until probed or calibrated."""
TILE = 128
"""Rows and columns of the tile of a product that a multiprocessor computes at a time."""
EPILOGUE = 36.0
"""Operations at the fp32 peak for each value of a product's result, in which tensor cores wait: an A100 loses most in
narrow models, a 4090 least. This, `TAIL`, `OVERLAP` and `COPY_SHARE` are fitted to half of bench/planner.py's steps."""
TAIL = 0.25
"""Of the time of a tile: what a product's last wave, full to any degree, leaves idle."""
GROUPED = 0.67
"""What experts' products, one after the other, reach of a dense one's speed: fitted likewise."""
SPLIT = 2048
"""Inner size beyond which a tile's sum is split among multiprocessors. Assumed."""
OVERLAP = 3.0
"""A product takes (compute^p + memory^p)^(1/p): 26 % more than either where both are equal. So do a GPU and the host
that feeds it: a pass has parts in which the host is slower and parts in which the device is."""
COPY_SHARE = 0.75
"""Share of a datasheet's memory bandwidth in elementwise work. Assumed until probed."""

# Share of the bf16 peak that FlashAttention-2 reaches on an A100 is 73 % forward and 63 % backward at best (Dao, arXiv
# 2307.08691, section 4); shorter sequences reach less. Processors: half of their product rate. Assumed until probed.
ATTENTION_SHARE = {"cuda": 0.6, "cpu": 0.5}
EFFICIENT = 0.6
"""What xFormers' and Triton's kernels reach of FlashAttention-2 (arXiv 2307.08691, section 4)."""
SHORT = 450
"""Tokens of a sequence at which a fused kernel reaches half of its share: FlashAttention-2's speed from 512 to 16 Ki
tokens, causal, heads of 128 (the same)."""
ATTENTION_BACKWARD = 2.5
"""FLOP of the attention core's backward over its forward (recomputes the scores; same paper); 2 of written scores."""

LAUNCH = {"cuda": 18e-6, "cpu": 4e-6}
"""Seconds to issue one eager operation where it was not measured: a PyTorch dispatch with autograd's bookkeeping, and
on GPUs the kernel's launch, as measured GPT iterations of small micro-batches show (vTrain, arXiv 2312.12391)."""

SETTING_WEIGHT = 4.0
"""A factor of two in threads or processes is as far as a factor of sixteen in a size."""


PRECISIONS = ("bf16", "fp16", "tf32", "fp32")
"""Of products in a model with fp32 weights, the first of equals first."""


@dataclass(frozen=True)
class DeviceUse:
    """How a device is used: `processes` ranks of `threads` threads each (a GPU: one of one). `cores`: what there is."""

    threads: int = 1
    processes: int = 1
    cores: int = 1

    @property
    def full(self) -> bool:
        """Whether no core is left over."""
        return self.threads * self.processes >= self.cores

    @property
    def share(self) -> float:
        """What is left of each thread when there are more threads than cores."""
        return min(1.0, max(1, self.cores) / (self.threads * self.processes))


def product_seconds(
    device: Device, precision: str, product: Product, setting: DeviceUse, factors: CostFactors = PLAIN
) -> Number:
    """Seconds of all `count` products on one rank."""
    flops = 2.0 * np.asarray(product.rows, dtype=float) * product.inner * product.columns
    if any(rate.what == "product" for rate in device.rates):
        sizes = (product.rows, product.inner, product.columns)
        each = factors.product * flops / _measured(device, "product", precision, sizes, setting)
    elif device.peak and device.kind == "cuda":
        each = _tiled(device, precision, product, factors)
    else:
        each = factors.product * flops / (_peak(device, precision) / _ranks(device, setting))
    return np.where(flops > 0, each * product.count, 0.0)[()]


def _tiled(device: Device, precision: str, product: Product, factors: CostFactors) -> Number:
    """Seconds of one product on a catalogue's GPU: tiles in waves over its multiprocessors, beside what they read and
    write. A module's products are counted as FLOP alone, with 1 for sizes that nobody knows: these lose nothing."""
    rows, inner, columns = (np.maximum(1, np.asarray(size)) for size in (product.rows, product.inner, product.columns))
    known = (rows > 1) & (inner > 1) & (columns > 1)
    reached = share(device, "product", precision) * (GROUPED if product.grouped else 1.0)
    speed = _peak(device, precision) * reached / factors.product
    ends = EPILOGUE / device.flops.get("fp32", speed)
    tile = TILE**2 * max(1, device.multiprocessors) * (2.0 * np.minimum(inner, SPLIT) / speed + ends)
    compute = 2.0 * rows * inner * columns / speed + known * factors.small * (rows * columns * ends + TAIL * tile)
    moved = known * VALUE_BYTES.get(precision, 2) * (rows * inner + inner * columns + rows * columns)
    memory = factors.memory * moved / (device.memory_bandwidth * COPY_SHARE)
    return (compute**OVERLAP + memory**OVERLAP) ** (1 / OVERLAP)


def backward(product: Product) -> tuple[Product, ...]:
    """The products that backward does for one of forward: of the gradients of the input and of the weight, if they
    have one."""
    rows, inner, columns, more = (
        product.rows,
        product.inner,
        product.columns,
        (product.count, False, False, product.grouped),
    )
    of_input = Product(rows, columns, inner, *more)
    of_weight = Product(inner, rows, columns, *more)
    return (of_input,) * (not product.leaf) + (of_weight,) * (not product.frozen)


def attention_seconds(
    device: Device, precision: str, work: Work, setting: DeviceUse, factors: CostFactors = PLAIN
) -> Number:
    """Seconds of the attention core of `work`, forward, at the best that the device does."""
    flop = work.attention
    if any(rate.what == "attention" for rate in device.rates):
        sizes = (work.length, work.head_size, work.length)
        speed = _measured(device, "attention", precision, sizes, setting)
    else:
        speed = _peak(device, precision) * share(device, "attention") / _ranks(device, setting)
    return factors.attention * flop / speed


def written(work: Work) -> Product:
    """The product, and one like it, that an attention core is which writes its scores."""
    return Product(work.attention / (2.0 * work.length * work.head_size), work.head_size, work.length)


def kernel_share(kernel: str, tokens: Number) -> Number:
    """What an attention kernel of a catalogue's GPU reaches of that in sequences of so many tokens."""
    return (EFFICIENT if kernel == "efficient" else 1.0) / (1 + SHORT / np.maximum(1, tokens))


def moved_seconds(device: Device, moved: Number, setting: DeviceUse, factors: CostFactors = PLAIN) -> Number:
    """Seconds of reading and writing `moved` bytes of memory, on one rank."""
    if device.copies:
        points = np.array([[c.threads, c.processes] for c in device.copies], dtype=float)
        values = np.array([c.bandwidth for c in device.copies])
        rate = _between(np.log2(points), np.log2(values), np.log2([setting.threads, setting.processes])) * setting.share
    else:
        rate = device.memory_bandwidth * COPY_SHARE / max(1, setting.processes)
    return factors.memory * moved / rate


def share(device: Device, what: str, precision: str = "") -> float:
    """The share of its peak that a named device sustains in large `product`s in a precision, or in `attention`."""
    assumed = PRODUCT_SHARE if what == "product" else ATTENTION_SHARE[device.kind]
    general = device.sustained.get(what, assumed)
    return device.sustained.get(precision, general) if what == "product" else general


def sustained(device: Device, precision: str) -> float:
    """FLOP/s that a device sustains in large products; 0 where it has no rate for the precision."""
    rate = device.flops.get(precision, 0.0)
    return rate * share(device, "product", precision) if device.peak else rate


def issue_seconds(device: Device) -> float:
    """Seconds the host needs to issue one eager operation."""
    return device.dispatch or LAUNCH[device.kind]


def peak(device: Device, precision: str) -> float:
    """The FLOP/s that count for MFU: the vendor's peak where the device is known, else the best measured."""
    if device.peak or device.kind == "cpu" or device.name not in clusters.known_devices():
        return _peak(device, precision)
    return _peak(clusters.device(device.name), precision)


def describe(device: Device) -> str:
    """Where this device's speeds come from."""
    if device.rates:
        return f"{device.source}; between measured shapes by inverse distance in log space"
    sustained = f"{share(device, 'product'):g} of the peak"
    return f"{device.source}; {sustained} in large products, less in small ones, assumed"


def rate(device: Device, precision: str) -> float:
    """`peak`, or 0 where there is none."""
    return peak(device, precision) if has(device, precision) else 0.0


def has(device: Device, precision: str) -> bool:
    """Whether a device has a rate for products in this precision."""
    return precision in device.flops


def _peak(device: Device, precision: str) -> float:
    if precision in device.flops:
        return device.flops[precision]
    wide = device.kind == "cpu" or precision == "fp64"
    near = "fp32" if wide else next((name for name in PRECISIONS if has(device, name)), "fp32")
    missing = f"training in {precision} is not there yet; " if precision.startswith("fp8") else ""
    raise UserError(
        f"{device.name} has no rate for {precision}.",
        why=f"{missing}its precisions are " + ", ".join(sorted(device.flops)),
        do=f'train.precision = "{near}", or "auto" for the fastest that the devices have',
    )


def _ranks(device: Device, setting: DeviceUse) -> float:
    """How many ranks' worth the whole device is: the inverse of one rank's share of a processor."""
    if device.kind == "cuda":
        return 1.0
    return max(1, setting.cores) / setting.threads / setting.share


def _measured(
    device: Device, what: str, precision: str, sizes: tuple[Number, Number, Number], setting: DeviceUse
) -> Number:
    """FLOP/s of one rank, between the measurements of that precision (of fp32, scaled, when it has none)."""
    rates = [rate for rate in device.rates if rate.what == what]
    base = precision if any(rate.precision == precision for rate in rates) else rates[0].precision
    scale = 1.0 if base == precision else _peak(device, precision) / _peak(device, base)
    rows = [rate for rate in rates if rate.precision == base]
    points = np.log2([[r.rows, r.inner, r.columns, r.threads, r.processes] for r in rows])
    low = points[:, :3].min(axis=0)
    high = points[:, :3].max(axis=0)
    asked = np.broadcast_arrays(*(np.log2(np.maximum(np.asarray(size, dtype=float), 1.0)) for size in sizes))
    inside = np.clip(np.stack(asked, axis=-1), low, high)
    used = np.broadcast_to(np.log2([setting.threads, setting.processes]), (*inside.shape[:-1], 2))
    stretch = np.array([1.0, 1.0, 1.0, SETTING_WEIGHT, SETTING_WEIGHT])
    per_thread = np.log2([r.flops / r.threads for r in rows])
    flops = _between(points * stretch, per_thread, np.concatenate([inside, used], axis=-1) * stretch)
    return flops * setting.threads * setting.share * scale


def _between(points: Any, values: Any, asked: Any) -> Number:
    """2 to the power of `values` [n] at `points` [n, d], averaged with weights 1/distance⁴ at `asked` [..., d]."""
    squares = ((asked[..., None, :] - points) ** 2).sum(axis=-1)
    weights = 1.0 / (squares + 1e-9) ** 2
    return 2.0 ** ((weights * values).sum(axis=-1) / weights.sum(axis=-1))
