"""A script with an Accelerator: accumulation, clipping, TensorBoard through `accelerator.log`; misa adds one line.

    python -m examples.accelerate_loop --budget 40MiB
"""

from __future__ import annotations

import contextlib

import misa
import torch
from accelerate import Accelerator
from misa.integrations.accelerate import Logged
from tqdm import tqdm

from examples.common import Text, arguments, begin, make_model, tell


def main() -> None:
    options = arguments(__doc__)
    data = torch.utils.data.DataLoader(Text(options), batch_size=options.rows, shuffle=True,
                                       generator=torch.Generator().manual_seed(1))
    begin()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard", project_dir=options.out)
    accelerator.init_trackers("accelerate")
    model = make_model(options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches = iter(data)
    losses = []
    with misa.manage(model, optimizer, budget=options.budget) if options.budget else contextlib.nullcontext() as run:
        logged = Logged(run) if run else lambda values: values
        for step in tqdm(range(options.steps), disable=None):
            for _ in range(2):
                with accelerator.accumulate(model):
                    loss = model(**next(batches)).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            losses.append(loss.item())
            if step % 5 == 4:
                accelerator.log(logged({"loss": losses[-1]}), step=step)
        tell(model, optimizer.optimizer, losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
