"""Hugging Face Trainer: one line before `trainer.train()`.

    from misa.integrations.transformers import manage_trainer
    manage_trainer(trainer, budget="8GiB")

The callback can be given to the Trainer as well, `Trainer(..., callbacks=[MisaCallback(budget="8GiB")])`; then loggers that
the Trainer has made before it (TensorBoard) do not get misa's entries. `MisaArguments` goes into an HfArgumentParser beside
TrainingArguments.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._manage import Run, manage
from ._figures import Figures


@dataclasses.dataclass
class MisaArguments:
    """Options of misa for HfArgumentParser: `--misa_budget 8GiB`."""

    misa_budget: str | None = dataclasses.field(
        default=None, metadata={"help": "Bytes on the device that this trainer may hold at once; without it misa is off."})
    misa_mode: str = dataclasses.field(default="exact", metadata={"help": "exact or sampled."})
    misa_step: str = dataclasses.field(default="deferred", metadata={"help": "deferred, eager or in_backward."})
    misa_daemon: str = dataclasses.field(default="auto", metadata={"help": "auto, required or private."})

    def callbacks(self) -> list[TrainerCallback]:
        """For `Trainer(callbacks=...)`: empty where no budget was given."""
        return [MisaCallback(**self.options())] if self.misa_budget is not None else []

    def options(self) -> dict[str, Any]:
        """For `manage_trainer(trainer, **arguments.options())`."""
        return {"budget": self.misa_budget, "mode": self.misa_mode, "step": self.misa_step, "daemon": self.misa_daemon}


class MisaCallback(TrainerCallback):
    """Manages model and optimizer from the beginning of `train()` to its end, with `misa.manage`'s options."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._figures: Figures | None = None
        self.run: Run | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: Any,
                       optimizer: Any, **kwargs: Any) -> None:
        self.run = manage(model, optimizer, **self._options)
        self._figures = Figures(self.run)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
               logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if logs is None or self._figures is None or self.run is None or self.run._manager is None or "loss" not in logs:
            return
        # The mean of the steps since the last log: what of the loss the Trainer tells.
        self.run.step_loss(logs["loss"], args.per_device_train_batch_size)
        figures = self._figures.take()
        logs.update(figures)
        if state.log_history:
            state.log_history[-1].update(figures)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close()

    def _close(self) -> None:
        if self.run is not None:
            self.run.close()
            self._figures = None


def manage_trainer(trainer: Trainer, **options: Any) -> MisaCallback:
    """Has misa manage what the trainer trains; call it before `trainer.train()`. Returns the callback, whose `run.report()`
    tells afterwards what happened.

    Args:
        trainer: the Trainer.
        options: `budget` and whatever else `misa.manage` takes.
    """
    callback = MisaCallback(**options)
    # Before the loggers, so that they see misa's entries.
    trainer.callback_handler.callbacks.insert(0, callback)
    return callback
