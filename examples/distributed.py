"""DistributedDataParallel over Gloo; misa adds one line on every rank.

    torchrun --nproc-per-node 2 -m examples.distributed --budget 60MiB
"""

from __future__ import annotations

import contextlib
import os

import misa
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm

from examples.common import Text, arguments, begin, make_model, tell


def main() -> None:
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rows = Text(options)
    data = DataLoader(rows, batch_size=options.rows, sampler=DistributedSampler(rows, shuffle=True, seed=1))
    begin()
    # Gradients that are views of the buckets are there once, not twice.
    model = DistributedDataParallel(make_model(options), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    job = f"{os.path.basename(__file__)} rank {rank}"
    with misa.manage(model, optimizer, budget=options.budget, job=job) if options.budget else contextlib.nullcontext():
        for _, batch in zip(tqdm(range(options.steps), disable=None if rank == 0 else True), data):
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            tell(model.module, optimizer, losses)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
