"""One number for the whole training state."""

from __future__ import annotations

import hashlib
from typing import Any, Iterator

import torch
from torch.optim import Optimizer

from ._manage import current_run, resident


def _named_tensors(model: torch.nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        yield f"model.{name}", parameter
    for name, buffer in model.named_buffers():
        yield f"model.{name}", buffer

    def walk(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield prefix, value
        elif isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{prefix}.{key}", inner)
        elif isinstance(value, (list, tuple)):
            for number, inner in enumerate(value):
                yield from walk(f"{prefix}.{number}", inner)

    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"group{number}.{place}")
            if parameter in optimizer.state:
                yield from walk(f"optimizer.{name}", optimizer.state[parameter])


def state_sha256(model: torch.nn.Module, optimizer: Optimizer) -> str:
    """SHA-256 over every tensor of model and optimizer state, names sorted: name, dtype, shape and raw bytes of each.

    Works on plain and managed objects alike; a managed tensor is on the device only while its bytes are read. Steps that
    are still due are done first.
    """
    run = current_run()
    if run is not None:
        run.flush()
    digest = hashlib.sha256()
    for name, tensor in sorted(_named_tensors(model, optimizer), key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        with torch.no_grad(), resident(tensor):
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                digest.update(memoryview(flat.view(torch.uint8).numpy()))
            del flat
    return digest.hexdigest()
