"""What a plan encodes on its way: the recipe's `comm.codec`, decided by the links and codecs that were measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from espalier.comm import codecs, compressed_collectives
from espalier.comm.base import Traffic
from espalier.comm.codecs import codec
from espalier.machine.cluster import Cluster, CodecSpeed
from espalier.mechanisms.codecs import hybrid_compression
from espalier.plan.ask import Ask
from espalier.plan.axes.placement_plan import LOSSLESS
from espalier.plan.choice import PlanChoice
from espalier.plan.collective_time import gpus
from espalier.plan.request import Crossing, Request

TRAINED = (Traffic.GRADIENTS, Traffic.PARAMETERS, Traffic.ACTIVATIONS, Traffic.KEYS_VALUES)
"""What may be encoded of what `train` sends; rows of experts and of halos have codecs of their own."""


class CodecChoice(PlanChoice):
    """Codecs by the links; `auto` looks at processors only: on GPUs nothing was measured."""

    def priced(self, ask: Ask) -> tuple[Request, Sequence[str]]:
        """The request with its crossings. Raises UserError for an unknown `comm.codec`."""
        return encoded(ask.request, ask.cluster)


def encoded(request: Request, cluster: Cluster) -> tuple[Request, Sequence[str]]:
    """The request with its crossings, and why, in sentences. Raises UserError for an unknown `comm.codec`."""
    several = cluster.machines > 1
    if request.recipe.comm.codec == "auto" and (gpus(cluster) or not several):
        return request, ()
    devices = list(range(len(cluster.devices())))
    bandwidth = cluster.slowest(devices, "between").bandwidth if several and not gpus(cluster) else None
    rates, sparse = _rates(cluster), codecs.SPARSE
    if sparse in rates:
        rates[sparse] = rates[sparse]._replace(ratio=request.profile.sparse)
    chosen = hybrid_compression.choose(request.recipe.comm.codec, bandwidth, rates)
    crossings = {}
    for kind in TRAINED:
        name = chosen.codecs.get(kind)
        if name is None:
            continue
        if kind is Traffic.PARAMETERS and not codec(name).lossless:
            name = LOSSLESS
        ratio = request.profile.sparse if name == sparse else compressed_collectives.ratio(codec(name))
        rate = rates.get(name) or hybrid_compression.CodecRate(ratio, float("inf"), float("inf"))  # coding is free
        lossy = kind is Traffic.GRADIENTS and not codec(name).lossless
        crossings[kind.value] = Crossing("between" if several else "all", name, *rate, lossy)
    reasons = [chosen.why] if crossings or request.recipe.comm.codec == "auto" else []
    if crossings:
        reasons.append(_by_class(crossings))
    if reasons and request.profile.sparse != 1.0:
        reasons.append(
            f"gradients that are not zero, with their places, are {1 / request.profile.sparse:.0%} of all "
            "(codec sparse)"
        )
    return replace(request, crossings=crossings), reasons


def _by_class(crossings: Mapping[str, Crossing]) -> str:
    """What becomes of each class of traffic, in a sentence."""
    words = {kind.value: kind.value.replace("_", " and ") for kind in (*TRAINED, Traffic.EXPERTS)}
    coded = [f"{words[kind]} as {way.codec}" for kind, way in crossings.items()]
    plain = [word for kind, word in words.items() if kind not in crossings]
    return f"{', '.join(coded)}; as they are: {', '.join(plain)}"


def measured(cluster: Cluster) -> Cluster:
    """A probed machine with the codecs of its processor, measured now."""
    speeds = tuple(CodecSpeed(name, *rate) for name, rate in hybrid_compression.measure().items())
    tables = [
        table.changed(device=table.device.changed(codecs=speeds)) if table.device.kind == "cpu" else table
        for table in cluster.nodes
    ]
    return cluster.changed(nodes=tuple(tables))


def _rates(cluster: Cluster) -> dict[str, hybrid_compression.CodecRate]:
    """Of the slowest device, codec by codec; a codec that some device has not measured is left out."""
    tables = [node.device.codecs for node in cluster.nodes]
    names = set.intersection(*({speed.codec for speed in table} for table in tables))
    rates = {}
    for name in sorted(names):
        speeds = [speed for table in tables for speed in table if speed.codec == name]
        least = (min(getattr(speed, what) for speed in speeds) for what in ("ratio", "encode", "decode"))
        rates[name] = hybrid_compression.CodecRate(*least)
    return rates


CHOICE = CodecChoice()
