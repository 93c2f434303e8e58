"""What is priced: layouts of a request, on one kind of rank of a fleet. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espalier.cost import Cut, Number
from espalier.plan.layouts import Layouts
from espalier.plan.network import Fleet, Kind
from espalier.plan.request import Request, Storage


@dataclass(frozen=True)
class Step:
    """What a price is of: request, fleet, the kind of rank at hand, and layouts."""

    request: Request
    on: Fleet
    kind: Kind
    layouts: Layouts

    @property
    def cut(self) -> Cut:
        """How the model is cut."""
        return Cut(self.layouts.tp, self.layouts.sp, self.layouts.algorithm != "fsp")

    @property
    def storage(self) -> Storage:
        """Bytes per parameter. Under bf16 today's trainer (replicated) keeps fp32 parameters and a copy; a sharded one
        keeps bf16 parameters and the masters with the optimizer."""
        return storage_of(self.request, self.layouts)

    @property
    def cuda(self) -> bool:
        """On a GPU."""
        return self.kind.table.device.kind == "cuda"

    @property
    def stage_layers(self) -> Number:
        """Layers of the fullest stage."""
        return -(-self.request.layers // np.asarray(self.layouts.pp))

    @property
    def stage_parameters(self) -> Number:
        """Trainable parameters that a rank of the fullest stage updates, before sharding."""
        request, pp = self.request, np.asarray(self.layouts.pp)
        outside = np.where(pp == 1, request.outside, request.outside / request.tables)
        return (self.stage_layers * request.layer_parameters + outside) / self.layouts.tp


def storage_of(request: Request, layouts: Layouts) -> Storage:
    """See `Step.storage`; each value may be an array."""
    if request.storage is not None:
        return request.storage
    width, low = request.bytes_each, request.low
    one_moment = request.matrix_parameters if request.optimizer == "muon" else 0
    moments = width * (2 * request.trainable - one_moment) / max(1, request.trainable)
    if not low:
        return Storage(width, width, moments)
    plain = (layouts.optimizer == 1) & (layouts.tp == 1) & (layouts.sp == 1) & (layouts.pp == 1)
    return Storage(np.where(plain, width + low, low), np.where(plain, width, low), np.where(plain, 0, width) + moments)
