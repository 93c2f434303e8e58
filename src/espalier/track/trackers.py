"""The run log for the trackers that people use: TensorBoard, trackio, MLflow, Weights & Biases, each behind its extra.

Each reads events as they are written (`track.to`) and works without a network: trackio and MLflow keep files of their
own, W&B writes offline files where nobody is logged in (`wandb sync` sends them later). Where a tracker's server is,
its own settings say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from espalier.recipe.errors import UserError, missing_extra
from espalier.track.events import Event

PROJECT = "espalier"


class Tracker(Protocol):
    """What takes the events of a run."""

    def event(self, event: Event) -> None:
        """Takes one event of the run log; those without a step or numbers leave no trace."""

    def close(self) -> None:
        """Writes out what is buffered."""


def opened(name: str, folder: Path) -> Tracker:
    """The tracker `name` of the run in `folder`. Raises UserError naming the extra where it is not installed, or what
    keeps it from starting."""
    if name == "tensorboard":
        return TensorBoard(folder / "tensorboard")
    kind = _KINDS[name]
    try:
        return kind(folder)
    except ModuleNotFoundError:
        raise missing_extra(name, name, f'track.to = ["{name}"]') from None
    except UserError:
        raise
    except Exception as error:  # a tracker's own errors have no common kind
        raise UserError(
            f'track.to = ["{name}"]: {name} cannot start.',
            why=f"{type(error).__name__}: {error}",
            do="mend its settings, or leave it out: the run log is written all the same",
        ) from error


_EVENTS = {"step": "train", "validation": "validation", "checkpoint": "checkpoint"}
_QUIET = ("event", "time", "step")


class TensorBoard:
    """Writes events as scalars into `folder`, step by step. Has state: an open event file.

    Raises UserError when tensorboard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_extra("tensorboard", "track", 'track.to = ["tensorboard"]') from None
        self._writer = SummaryWriter(str(folder))

    def event(self, event: Event) -> None:
        """Takes one event of the run log; those without a step or numbers leave no trace."""
        for tag, value in scalars(event):
            self._writer.add_scalar(tag, value, event["step"], event.get("time"))

    def close(self) -> None:
        """Writes out what is buffered."""
        self._writer.close()


def scalars(event: Event) -> Iterator[tuple[str, float]]:
    """(name, value) of the numbers in an event of a step, a validation or a checkpoint."""
    kind = _EVENTS.get(event["event"])
    if kind is None or event.get("step") is None:
        return
    for key, value in event.items():
        if key in _QUIET:
            continue
        if isinstance(value, dict):
            yield from ((f"{kind}/{key}/{name}", float(item)) for name, item in value.items() if _number(item))
        elif _number(value):
            yield f"{kind}/{key}", float(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Wandb:
    """Weights & Biases. Has state: an open run."""

    def __init__(self, folder: Path) -> None:
        import wandb

        mode: Any = None if wandb.login(prompt=False) else "offline"
        self._run = wandb.init(project=PROJECT, name=folder.name, dir=str(folder), mode=mode)

    def event(self, event: Event) -> None:
        """See `Tracker`. Validations of a step come after it, so steps are a column and not W&B's own."""
        if values := dict(scalars(event)):
            self._run.log({**values, "step": event["step"]})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """MLflow: into `RUN/mlflow.db` where no server is set. Has state: an open run."""

    def __init__(self, folder: Path) -> None:
        import mlflow

        uri = None if mlflow.is_tracking_uri_set() else f"sqlite:///{folder.absolute() / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(uri)
        existing = self._client.get_experiment_by_name(PROJECT)
        experiment = self._client.create_experiment(PROJECT) if existing is None else existing.experiment_id
        self._run = self._client.create_run(experiment, run_name=folder.name).info.run_id

    def event(self, event: Event) -> None:
        for key, value in scalars(event):
            self._client.log_metric(self._run, key, value, step=event["step"])

    def close(self) -> None:
        self._client.set_terminated(self._run)


class Trackio:
    """trackio: into its local database. Has state: an open run."""

    def __init__(self, folder: Path) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=PROJECT, name=folder.name, resume="allow")

    def event(self, event: Event) -> None:
        if values := dict(scalars(event)):
            self._trackio.log(values, step=event["step"])

    def close(self) -> None:
        self._trackio.finish()


_KINDS: dict[str, Callable[[Path], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow, "trackio": Trackio}
