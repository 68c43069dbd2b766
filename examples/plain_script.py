"""A training script as people write them, as torchtune's recipes are: groups with and without weight decay, accumulation,
clipping, a schedule, a progress bar. `--budget` is the one line that misa adds.

    python -m examples.plain_script --budget 40MiB
"""

from __future__ import annotations

import contextlib

import misa
import torch
from tqdm import tqdm

from examples.common import Text, arguments, begin, make_model, tell

ACCUMULATION = 2


def main() -> None:
    options = arguments(__doc__)
    data = torch.utils.data.DataLoader(Text(options), batch_size=options.rows, shuffle=True,
                                       generator=torch.Generator().manual_seed(1))
    begin()
    model = make_model(options)
    optimizer = torch.optim.AdamW([
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ], lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=options.steps + 1)
    batches = iter(data)
    losses = []
    with misa.manage(model, optimizer, budget=options.budget) if options.budget else contextlib.nullcontext():
        for _ in tqdm(range(options.steps), disable=None):
            optimizer.zero_grad()
            total = 0.0
            for _ in range(ACCUMULATION):
                loss = model(**next(batches)).loss / ACCUMULATION
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(total)
        tell(model, optimizer, losses)


if __name__ == "__main__":
    main()
