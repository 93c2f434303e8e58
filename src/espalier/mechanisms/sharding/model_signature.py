"""Model signature: what a model looked like when it was wrapped, and the error if it changes or gives a gradient
twice."""

from __future__ import annotations

from torch import nn

from espalier.recipe.errors import UserError


class ModelSignature:
    """A model's modules and parameters as they are now."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(module, len(module._modules), len(module._parameters)) for module in model.modules()]
        self._parameters = [
            (f"{prefix}.{name}".lstrip("."), module._parameters, name, parameter, parameter.requires_grad)
            for prefix, module in model.named_modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def check(self, model: nn.Module, *, may_freeze: bool = False) -> None:
        """Raises UserError naming the first change. With `may_freeze`, a parameter frozen for a while is no change."""
        for path, owner, name, parameter, trainable in self._parameters:
            thawed = parameter.requires_grad and not trainable
            if owner.get(name) is not parameter or thawed or (trainable > parameter.requires_grad and not may_freeze):
                raise changed(path, model)
        for module, modules, parameters in self._modules:
            if len(module._modules) != modules or len(module._parameters) != parameters:
                raise changed(type(module).__name__, model)


def twice(name: str) -> UserError:
    """The error for a gradient that came twice."""
    return UserError(
        f"Parameter '{name}' got its gradient twice in one backward.",
        why="its unit may already be on the wire (reentrant checkpointing, or two backwards in one micro-batch)",
        do="use torch.utils.checkpoint with use_reentrant=False; one backward per `accumulate` block",
    )


def changed(where: str, model: nn.Module) -> UserError:
    """The error for a model that is not what was wrapped."""
    return UserError(
        f"The model ({type(model).__name__}) changed at '{where}' after it was sharded.",
        why="a parameter was added, replaced, moved, frozen or thawed; its gradient would be exchanged incorrectly",
        do="change the model first, then wrap it; or call detach() and wrap it again",
    )
