"""One codec for each kind of traffic, by policy: hybrid compression (Xu, Anthony, Zhou et al., arXiv 2409.02423).

Gradients are averaged over many ranks and may be rounded hard; activations and parameters are used at once and are
rounded mildly or not at all. The paper's three schemes are policies here; `auto` compresses what crosses a measured
link only where that pays. Deviations, and why:

- Gradients go in 8-bit blocks by default, with error feedback: about eight times as exact as ZFP at the same bits.
- Parameters are never rounded in `train`: the paper keeps a copy in full precision beside them, our shards move the
  parameters themselves.
- The paper's rates are not published with its tables; 8 and 16 bits are what its text names.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from espalier.comm import wire_format
from espalier.comm.base import Traffic, check_feedback
from espalier.comm.codecs import AUTO, FAMILIES, MARGIN, SPARSE, codec
from espalier.comm.compressed_collectives import PIECE
from espalier.recipe.cost import in_turn
from espalier.recipe.errors import UserError, nearest

BATCH = 0.01
"""Seconds of a batch of measured calls: several time slices of Linux's scheduler (3 ms)."""


def _scheme(summed: str, used: str) -> dict[Traffic, str]:
    """Codecs of what many ranks add up, and of what is used at once."""
    sums = Traffic.GRADIENTS, Traffic.OUTER_STEP
    return dict.fromkeys(sums, summed) | dict.fromkeys(
        (Traffic.ACTIVATIONS, Traffic.KEYS_VALUES, Traffic.PARAMETERS), used
    )


POLICIES: dict[str, dict[Traffic, str]] = {
    "naive": _scheme("zfp:8", "zfp:8"),
    "mzhybrid": _scheme("zfp:8", "mpc"),
    "zhybrid": _scheme("zfp:8", "zfp:16"),
}
"""The paper's schemes, section on hybrid compression: by class of traffic."""


class CodecRate(NamedTuple):
    """What one codec does on one core: raw bytes over encoded bytes, and raw bytes/s."""

    ratio: float
    encode: float
    decode: float

    def over(self, bandwidth: float) -> float:
        """Raw bytes/s that get through a link of so many bytes/s: one thread encodes what goes and decodes what comes,
        piece by piece, while others are on their way."""
        return min(in_turn(self.encode, self.decode), self.ratio * bandwidth)


@dataclass(frozen=True)
class ChosenCodecs:
    """The codecs of a plan, by class of traffic (what is missing goes as it is), and why."""

    codecs: Mapping[Traffic, str]
    why: str


def choose(option: str, bandwidth: float | None, rates: Mapping[str, CodecRate]) -> ChosenCodecs:
    """The codecs for links of one level.

    Args:
        option: `auto`, `exact`, a policy, or a codec for gradients (`int8`, `zfp:8` …).
        bandwidth: bytes/s of the slowest such link; None: there is none, and `auto` compresses nothing.
        rates: measured, by codec; what is missing `auto` does not choose. The ratio of `sparse` is that of the model's
            gradients: of values without zeros it is below 1.

    Raises:
        UserError: there is no such policy or codec, or error feedback diverges with it.
    """
    if option in POLICIES:
        return ChosenCodecs(POLICIES[option], f"comm.codec = {option}: the paper's scheme")
    if option != "auto":
        family = option.removesuffix("!").partition(":")[0]
        if family not in FAMILIES:
            near = nearest(family, [*POLICIES, *FAMILIES, "auto"])
            why = f"policies are auto, {', '.join(POLICIES)}; codecs {', '.join(FAMILIES)}"
            raise UserError(f"comm.codec = {option!r} is unknown.", why=why, do=f"comm.codec={near or 'auto'}")
        check_feedback(codec(option))
        name = codec(option).name
        return ChosenCodecs({} if name == "exact" else {Traffic.GRADIENTS: name}, f"comm.codec = {name}")
    if bandwidth is None:
        return ChosenCodecs({}, "nothing is compressed inside one machine")
    if not rates:
        return ChosenCodecs({}, "nothing is compressed: no codec was measured here (espalier probe)")
    by_kind = {}
    for kind, name in AUTO.items():
        names = (SPARSE, name) if kind is Traffic.GRADIENTS else (name,)
        paying = [name for name in names if name in rates and pays(rates[name], bandwidth)]
        if paying:
            by_kind[kind] = max(
                paying, key=lambda candidate: rates[candidate].over(bandwidth)
            )  # of equals the one without loss
    best = max((rates[name].over(bandwidth) / bandwidth for name in by_kind.values()), default=1.0)
    shown = f"{8e-6 * bandwidth:,.0f} Mbit/s between machines"
    if not by_kind:
        return ChosenCodecs({}, f"nothing is compressed: {shown} are no slower than the codecs")
    return ChosenCodecs(
        by_kind, f"gradients go as {by_kind.get(Traffic.GRADIENTS, 'they are')}: {best:.1f} times {shown}"
    )


def pays(rate: CodecRate, bandwidth: float) -> bool:
    """Whether a link carries more with this codec than without, by `MARGIN`. A codec slower than that never does."""
    return rate.over(bandwidth) > MARGIN * bandwidth


def measure(names: Iterable[str] = (), seconds: float = 0.2) -> dict[str, CodecRate]:
    """Measures codecs on this machine, on one thread, on normal float32 values, as whole messages with their checksums.
    What else runs here meanwhile slows them down, and counts.

    Args:
        names: default: those that `auto` may choose.
        seconds: for each.
    """
    values = torch.randn(PIECE, generator=torch.Generator().manual_seed(1)) * 1e-3
    origin = (wire_format.Bucket(Traffic.GRADIENTS, 0), 0)
    measured = {}
    for name in names or sorted({*AUTO.values(), SPARSE}):
        codec_ = codec(name)
        sends, _ = wire_format.seal(codec_, values, origin[0])
        first = sends[0]
        rest = sends[1] if len(sends) > 1 else None
        ways = (
            partial(wire_format.seal, codec_, values, origin[0]),
            partial(wire_format.opened, codec_, (first, rest), values, origin),
        )
        encode, decode = (_usual_seconds(way, seconds / 2) for way in ways)
        sent = sum(part.nbytes for part in sends) - wire_format.HEADER
        measured[name] = CodecRate(values.nbytes / sent, values.nbytes / encode, values.nbytes / decode)
    return measured


def _usual_seconds(run: Callable[[], object], seconds: float) -> float:
    """Seconds of a call: the median of batches, each long enough to be interrupted by what else usually runs here."""
    run()  # compiles too
    batches: list[float] = []
    end = time.perf_counter() + seconds
    while len(batches) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        calls = 0
        while (took := time.perf_counter() - begin) < BATCH or not calls:
            run()
            calls += 1
        batches.append(took / calls)
    return statistics.median(batches)
