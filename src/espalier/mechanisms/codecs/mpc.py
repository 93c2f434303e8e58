"""Words without their repetitions and without loss: MPC (Yang et al., IEEE Cluster 2015), the lossless codec of
hybrid compression (arXiv 2409.02423). On dense gradients it saves a tenth; `split` saves more of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from espalier.comm.codec_input import bytes_of, check_length
from espalier.kernels import mpc as kernels
from espalier.recipe.errors import UserError


class Mpc:
    """`mpc` or `mpc:d`. Takes every dtype of 2, 4 or 8 bytes; every bit comes back, NaN payloads included.

    Args:
        dims: d from 1 to 32, the values of a record: each is compared with the one d before it.

    Raises:
        UserError: another d.
    """

    lossless = True
    fixed = False
    runs_on = staticmethod(kernels.pack.runs_on)

    def __init__(self, dims: int = 1) -> None:
        if not 1 <= dims <= 32:
            raise UserError(f"mpc's d is {dims}.", why="its header has room for 1 to 32", do="mpc:1")
        self.dims = dims
        self.name = "mpc" if dims == 1 else f"mpc:{dims}"

    def encode(self, tensor: Tensor) -> Tensor:
        """[n] to bytes. Raises UserError for dtypes of another size."""
        width = tensor.element_size()
        if width not in kernels.WORDS or tensor.is_complex():
            raise UserError(
                f"Codec 'mpc' got {str(tensor.dtype).removeprefix('torch.')}.",
                why="it takes words of 2, 4 or 8 bytes",
                do="codec 'split' or 'exact'",
            )
        stays = tensor.device.type != "cpu" and self.runs_on(tensor.device.type)
        flat = tensor.detach().reshape(-1).contiguous() if stays else bytes_of(tensor)
        return kernels.pack(flat.view(kernels.WORDS[width]), self.dims)

    def decode(self, wire: Tensor, like: Tensor) -> Tensor:
        """Every bit. Raises UserError where the bytes are no stream, RunFailed where it is one of another length."""
        wire = wire.to(like.device) if self.runs_on(like.device.type) else wire
        words = kernels.unpack(wire, like.element_size())
        check_length(words.view(torch.uint8), like.nbytes, self.name)
        return words.view(like.dtype).view(like.shape).to(like.device) if words.numel() else torch.empty_like(like)

    def wire_bytes(self, elements: Any, element_bytes: int) -> Any:
        """At most: the bitmap beside the values."""
        return kernels.most_bytes(elements, element_bytes)
