"""How is one operation made fast? The table: an operation, its plain reference, and its fast forms by device and shape.

A fast form exists only as an addition to an operation, and an operation begins with its reference: there is no way to
register one without the other. Loads torch and nothing compiled; a form imports its compiler when it first runs.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True)
class KernelForm(Generic[Arguments, Result]):
    """One way to run an operation.

    Attributes:
        name: that of its function.
        run: takes what the reference takes, returns what it returns.
        device: torch device type it runs on; "" for any.
        wins: called with the same arguments: may this form take them, and does it beat the others?
    """

    name: str
    run: Callable[Arguments, Result]
    device: str
    wins: Callable[..., bool]


class Operation(Generic[Arguments, Result]):
    """One operation: calling it runs the first fast form that wins, else the reference. Has state: its forms.

    The first argument decides the device; it has a `.device` (a tensor, or a format that holds tensors).

    >>> @operation("double")
    ... def double(x):
    ...     return x + x
    >>> @double.fast("cpu", wins=lambda x: x.numel() > 1000)
    ... def in_place(x):
    ...     return x.clone().mul_(2)
    >>> double.pick(torch.ones(3)).name, double.pick(torch.ones(2000)).name
    ('double', 'in_place')
    """

    def __init__(self, name: str, reference: Callable[Arguments, Result]) -> None:
        self.name = name
        self.reference: KernelForm[Arguments, Result] = KernelForm(reference.__name__, reference, "", _always)
        self.forms: list[KernelForm[Arguments, Result]] = []
        self.__doc__ = reference.__doc__

    def fast(
        self, device: str, *, wins: Callable[..., bool] | None = None
    ) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
        """Adds the decorated function as a form for `device` ("cpu", "cuda"), asked after those added before it."""

        def add(run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
            assert run.__name__ not in {form.name for form in (self.reference, *self.forms)}
            self.forms.append(KernelForm(run.__name__, run, device, wins or _always))
            return run

        return add

    def pick(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> KernelForm[Arguments, Result]:
        """The form that would run these arguments."""
        first: Any = args[0]
        device = first.device.type
        for form in self.forms:
            if form.device == device and form.wins(*args, **kwargs):
                return form
        return self.reference

    def runs_on(self, device: str) -> bool:
        """Whether there is a fast form for tensors on `device`, so that they may stay where they are."""
        return any(form.device == device for form in self.forms)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        """Runs the form that `pick` names."""
        return self.pick(*args, **kwargs).run(*args, **kwargs)


def has_triton() -> bool:
    """Whether forms written in Triton can run here."""
    return importlib.util.find_spec("triton") is not None


OPERATIONS: dict[str, Operation[Any, Any]] = {}


def operation(name: str) -> Callable[[Callable[Arguments, Result]], Operation[Arguments, Result]]:
    """Makes the decorated plain reference the operation `name` of the table."""

    def add(reference: Callable[Arguments, Result]) -> Operation[Arguments, Result]:
        assert name not in OPERATIONS, f"two operations are called {name!r}"
        OPERATIONS[name] = Operation(name, reference)
        return OPERATIONS[name]

    return add


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def aligned(wire: Tensor) -> Tensor:
    """`wire`, copied where words of 8 bytes cannot be read from it."""
    return wire.clone() if wire.data_ptr() % 8 or not wire.is_contiguous() else wire
