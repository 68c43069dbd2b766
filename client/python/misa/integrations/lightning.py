"""Lightning: one callback.

    from misa.integrations.lightning import MisaCallback
    trainer = Trainer(..., callbacks=[MisaCallback(budget="8GiB")])
"""

from __future__ import annotations

from typing import Any

import torch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the other name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer

from .._manage import Run, manage
from ._figures import Figures


class MisaCallback(Callback):
    """Manages the module and its optimizers from the start of training to its end, with `misa.manage`'s options; writes
    `misa/…` entries to the trainer's loggers every `log_every_n_steps`, and shows the device's bytes in the progress bar."""

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._figures: Figures | None = None
        self.run: Run | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.run = manage(pl_module, trainer.optimizers, **self._options)
        self._figures = Figures(self.run)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self.run is not None and self.run.is_managing() and isinstance(loss, torch.Tensor) and loss.numel() == 1:
            # The batch's optimizer step has ended: the guards hear of its loss with the next one.
            self.run.step_loss(loss)
        if self._figures is None or (trainer.global_step + 1) % max(1, trainer.log_every_n_steps):
            return
        figures = self._figures.take()
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=trainer.global_step)
        if trainer.progress_bar_callback is not None:
            pl_module.log("misa_mib", figures["misa/device_mib"], prog_bar=True, logger=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def _close(self) -> None:
        if self.run is not None:
            self.run.close()
            self._figures = None
