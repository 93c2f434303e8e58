"""Fits the planner's few coefficients to measured steps, and says how sure it is. No torch.

Each factor of `plan.calibration_factors` is a multiple of a datasheet's or an assumed value. They are fitted together,
in logarithms, by robust least squares with a prior that holds each near 1 until measurements say otherwise, and within
what is physical: no product is faster than the peak, no link than its bandwidth (scipy's trust-region reflective). The
spread of what remains is the uncertainty of a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from espalier.machine.cluster import Cluster
from espalier.plan import collective_time, device_model
from espalier.plan.calibration_factors import PLAIN, CostFactors
from espalier.plan.layout_estimate import grid, slowest
from espalier.plan.layouts import ARRAYS, ONE, Layouts
from espalier.plan.request import Request
from espalier.recipe.errors import UserError
from espalier.recipe.serialization import Value

UNCALIBRATED = 0.25
"""Relative error to expect of a step's seconds where nothing was calibrated, on devices that were probed or are known
from whole runs: those of Megatron-LM on up to 3,072 A100s (arXiv 2104.04473, 2205.05198) are met within 12 %, eager
PyTorch on newer devices within 40 %."""
UNKNOWN = 0.5
"""The same of a device of which only the peak is known. The catalogue says it of its own devices (`Device.spread`)."""
INDIRECT = 0.6
INDIRECT_SHARE = 0.5
"""The same of ranks that exchange over a link of which collectives reach less than this share, through host memory or
TCP: published bandwidths of such links differ by a factor of three (`devices.toml`)."""
LEAST = 0.02
"""No prediction claims to be closer than this."""
NOISE = 0.05
"""Relative scatter of a measured step about a perfect model; the prior's widths are measured against it."""

FOUR_OF_FIVE = 1.28
"""Standard deviations within which four of five values of a normal distribution lie."""
DOUBLING = 0.03
"""Relative error that each doubling of the ranks beyond the measured ones adds. Assumed."""

PRIOR = {
    "product": 0.2, "small": 0.6, "attention": 0.4, "memory": 0.3, "issue": 0.3, "inside": 0.3, "between": 0.4,
    "call": 0.7, "exposed": 0.7, "stall": 1.0,
}  # fmt: skip
"""How far each factor may easily be from 1, in logarithms."""

HELD = 0.25
PEAKS = 0.15
HELD_RANGE = (0.4, 2.5)
"""The same for activations and slack; the scatter of a measured peak; how far the factor may go."""

LOWEST = {
    "product": device_model.PRODUCT_SHARE, "attention": 0.4, "memory": device_model.COPY_SHARE, "inside":
    collective_time.LINK_SHARE["inside"], "between": collective_time.LINK_SHARE["between"], "exposed": 0.1,
}  # fmt: skip
"""Below these a device or link would beat its datasheet. `product`: of devices that say what they sustain, that
(`lowest`); `attention`: devices sustain different shares."""
RANGE = (0.1, 20.0)
EXPOSED = 5.0
"""The factor of `exposed` at which nothing is hidden."""


@dataclass(frozen=True)
class Measurement:
    """One layout that was run: what it was, and what was measured of it (None: not measured). `stack`: what ran it;
    `memory`: which bytes the peak counts (`estimate.UNCOUNTED`)."""

    request: Request
    cluster: Cluster
    layout: Layouts
    step_seconds: float | None = None
    peak_bytes: float | None = None
    out_of_memory: bool | None = None
    label: str = ""
    stack: str = ""
    memory: str = "device"


class Calibration(Value, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What measurements say of the coefficients.

    Attributes:
        factors: multiples of the datasheet's coefficients.
        errors: standard error of each factor's logarithm.
        spread: relative distance of a prediction within which four of five measured steps should lie.
        rows: measured steps it rests on; source: where they come from.
        stacks: what ran them; ranks: the most of one run.
    """

    factors: CostFactors = PLAIN
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    spread: float = UNCALIBRATED
    rows: int = 0
    source: str = "datasheets; nothing measured"
    stacks: tuple[str, ...] = ()
    ranks: int = 0

    def on(self, cluster: Cluster, ranks: int, stack: str = "") -> Calibration:
        """The same, as certain as it is of a run on these ranks: where no time was measured, as what is known of their
        devices and links; less on another stack than the measured ones, and on more ranks."""
        on = collective_time.fleet(cluster, ranks)
        used = (on.inside if on.per_node > 1 else None, on.between)
        indirect = any(link is not None and not link.measured and 0 < link.share < INDIRECT_SHARE for link in used)
        devices = [kind.table.device for kind in on.kinds]
        spreads = [
            device.spread or (UNKNOWN if device.peak and not device.rates else UNCALIBRATED) for device in devices
        ]
        plain = max(*spreads, INDIRECT if indirect else 0.0)
        if not self.rows:
            return self.changed(spread=plain) if self.spread == UNCALIBRATED else self
        doublings = np.log2(max(1.0, ranks / self.ranks)) if self.ranks else 0.0
        parts = (self.spread, plain * self.foreign(stack), DOUBLING * doublings)
        return self if not any(parts[1:]) else self.changed(spread=float(np.linalg.norm(parts)))

    def foreign(self, stack: str) -> bool:
        """Whether this stack is none of those that were measured. Unnamed ones are not told apart."""
        return bool(self.stacks and stack and stack not in self.stacks)

    def doubt(self, stack: str) -> str:
        """What to say of predictions for a stack that was not measured; empty where there is nothing to say."""
        measured = " and ".join(self.stacks)
        sentence = f"Calibrated on {measured}, not on {stack}: predictions may be worse, and their bands are wider."
        return sentence if self.foreign(stack) else ""

    @property
    def band(self) -> tuple[float, float]:
        """Factors below and above a predicted time within which four of five measurements should lie."""
        return 1 / (1 + self.spread), 1 + self.spread


def own_stack(cluster: Cluster) -> str:
    """The stack of Espalier's own runs on such machines."""
    return f"espalier on {cluster.nodes[0].device.name}"


DATASHEET = Calibration()
"""Nothing measured."""


class Batch:
    """Measurements that can be priced in one call each: those of one request and one fleet."""

    def __init__(self, rows: Sequence[Measurement]) -> None:
        self.size = len(rows)
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, row in enumerate(rows):
            layout = row.layout
            world = int(row.layout.world)
            key = (id(row.request), id(row.cluster), world, row.memory, *(getattr(layout, name) for name in ONE))
            groups.setdefault(key, []).append(index)
        self.rows = rows
        self.groups = [(np.array(chosen), *_together([rows[index] for index in chosen])) for chosen in groups.values()]

    def seconds(self, factors: CostFactors) -> Any:
        """Seconds of every measurement [rows], without the bytes."""
        seconds = np.zeros(self.size)
        for chosen, request, on, layouts in self.groups:
            seconds[chosen] = slowest(request, replace(on, factors=factors), layouts)
        return seconds

    def predict(self, factors: CostFactors) -> Any:
        """Seconds, peak bytes as they were counted and bytes beyond the limit of every measurement [3, rows]."""
        predicted = np.zeros((3, self.size))
        for chosen, request, on, layouts in self.groups:
            priced = grid(request, replace(on, factors=factors), layouts, self.rows[chosen[0]].memory)
            predicted[:, chosen] = priced.seconds, priced.peak, priced.over
        return predicted


def _together(rows: Sequence[Measurement]) -> tuple[Request, collective_time.Fleet, Layouts]:
    first = rows[0]
    arrays: dict[str, Any] = {name: np.array([getattr(row.layout, name) for row in rows]) for name in ARRAYS}
    layouts = replace(first.layout, **arrays)
    return first.request, collective_time.fleet(first.cluster, int(first.layout.world), first.layout.threads), layouts


def calibrate(measurements: Sequence[Measurement], source: str = "measurements") -> Calibration:
    """The factors that explain `measurements` best.

    Args:
        measurements: steps that were run; those without `step_seconds` or `peak_bytes` say nothing of that.
        source: where they come from, for the plan's own record.

    Raises:
        UserError: there is nothing to learn from, or a measured time is off by a factor of 1000 (units).
    """
    for row in measurements:
        if not isinstance(row, Measurement):
            raise UserError(
                f"{row!r} is not a measurement.", do="espalier.plan.Measurement(request, cluster, layout, …)"
            )
    timed = [row for row in measurements if row.step_seconds is not None and not row.out_of_memory]
    full = [row for row in measurements if row.peak_bytes is not None and not row.out_of_memory]
    if not timed and not full:
        raise UserError("There is no measured step to calibrate on.", do="rows with a measured time or peak memory")
    times: dict[str, Any] = _times(timed) if timed else {"factors": {}, "errors": {}, "spread": UNCALIBRATED}
    memory_factor = _memory_factor(full) if full else {}
    return Calibration(
        factors=PLAIN.changed(**times["factors"], **memory_factor),
        errors=times["errors"],
        spread=times["spread"],
        rows=len(timed),
        source=source,
        stacks=tuple(sorted({row.stack for row in timed if row.stack})),
        ranks=max((int(row.layout.world) for row in timed), default=0),
    )


def _times(rows: Sequence[Measurement]) -> dict[str, Any]:
    """The factors of seconds, their errors, and the spread that remains."""
    from scipy.optimize import least_squares

    batch = Batch(rows)
    measured = np.array([row.step_seconds for row in rows], dtype=float)
    refuse_other_units(batch.predict(PLAIN)[0], measured, "step times", "seconds")
    names = list(PRIOR)
    width = np.array([PRIOR[name] for name in names])
    low = np.log(list(lowest(rows).values()))
    high = np.log([EXPOSED if name == "exposed" else RANGE[1] for name in names])

    def misses(at: Any) -> Any:
        factors = CostFactors(**dict(zip(names, np.exp(at).tolist(), strict=True)))
        return np.concatenate([np.log(batch.seconds(factors) / measured) / NOISE, at / width])

    fitted = least_squares(misses, np.zeros(len(names)), bounds=(low, high), loss="soft_l1", x_scale=width, ftol=1e-4)
    rest = misses(fitted.x)[: len(rows)] * NOISE
    free = max(1.0, len(rows) - len(names) / 2)  # the prior takes part of each factor's freedom
    spread = float(np.sqrt(np.sum(rest**2) / free))
    covariance = np.linalg.inv(fitted.jac.T @ fitted.jac) * max(1.0, (spread / NOISE) ** 2)
    return {
        "factors": dict(zip(names, np.exp(fitted.x).tolist(), strict=True)),
        "errors": dict(zip(names, np.sqrt(np.diag(covariance)).tolist(), strict=True)),
        "spread": _shrunk(FOUR_OF_FIVE * spread, len(rows)),
    }


def lowest(rows: Sequence[Measurement]) -> dict[str, float]:
    """The least that each factor may be: a product takes no less than its FLOP at the peak of the measured devices."""
    shares = {
        device_model.share(node.device, "product", row.request.precision) for row in rows for node in row.cluster.nodes
    }
    return {name: LOWEST.get(name, RANGE[0]) for name in PRIOR} | {"product": max(shares)}


def _shrunk(spread: float, rows: int) -> float:
    """The spread, drawn towards that of datasheets while rows are few."""
    return max(LEAST, float(np.sqrt((rows * spread**2 + 2 * UNCALIBRATED**2) / (rows + 2))))


def _memory_factor(rows: Sequence[Measurement]) -> dict[str, float]:
    """The factor of activations and slack that explains the peaks best, held near 1 by a prior: where a peak is mostly
    states and runtime it says little of them."""
    from scipy.optimize import minimize_scalar

    batch = Batch(rows)
    measured = np.array([row.peak_bytes for row in rows], dtype=float)
    refuse_other_units(batch.predict(PLAIN)[1], measured, "peaks of memory", "bytes")

    def miss(at: float) -> float:
        predicted = batch.predict(PLAIN.changed(activations=float(np.exp(at))))[1]
        return float(np.sum(np.abs(np.log(predicted / measured)) / PEAKS) + (at / HELD) ** 2 / 2)

    low, high = np.log(HELD_RANGE)
    return {"activations": float(np.exp(minimize_scalar(miss, bounds=(low, high), method="bounded").x))}


def refuse_other_units(predicted: Any, measured: Any, what: str, unit: str) -> None:
    """Raises UserError when the measured values are a thousand times (or a 1024th of) what they can be."""
    if np.any(~np.isfinite(measured)) or np.any(measured <= 0):
        raise UserError(f"The measured {what} are not all positive numbers.", do="leave out rows without a measurement")
    factor = float(np.exp(np.median(np.log(measured / predicted))))
    for power in (1, 2, 3):
        for wrong, hint in ((1000.0**power, "divide"), (1000.0**-power, "multiply")):
            if 1 / 15 < factor / wrong < 15:
                raise UserError(
                    f"The measured {what} are {factor:,.3g} times what the machines can do.",
                    why=f"they must be in {unit}",
                    do=f"{hint} them by {1000**power:,}",
                )
