"""Lightning's Trainer with its progress bar, clipping, accumulation and TensorBoard; misa is one callback.

    python -m examples.lightning_fit --budget 40MiB
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from misa.integrations.lightning import MisaCallback

from examples.common import Text, arguments, begin, make_model, tell


class Model(lightning.LightningModule):
    def __init__(self, inside: torch.nn.Module) -> None:
        super().__init__()
        self.inside = inside
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss = self.inside(**batch).loss
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


def main() -> None:
    options = arguments(__doc__)
    data = torch.utils.data.DataLoader(Text(options), batch_size=options.rows, shuffle=True,
                                       generator=torch.Generator().manual_seed(1))
    begin()
    model = Model(make_model(options))
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=options.steps, max_epochs=-1, accumulate_grad_batches=2, gradient_clip_val=1.0,
        logger=TensorBoardLogger(options.out, "lightning"), log_every_n_steps=5, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[MisaCallback(budget=options.budget)] if options.budget else [])
    trainer.fit(model, data)
    tell(model, trainer.optimizers[0], model.losses)


if __name__ == "__main__":
    main()
