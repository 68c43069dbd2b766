"""What frameworks wrap around models and optimizers, taken off; and what cannot be managed, said."""

from __future__ import annotations

import torch
from torch.optim import Optimizer


def unwrap_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, DataParallel or torch.compile's module."""
    while True:
        name = type(model).__name__
        if name in ("DistributedDataParallel", "DataParallel") and isinstance(getattr(model, "module", None), torch.nn.Module):
            model = model.module
        elif name == "OptimizedModule" and isinstance(getattr(model, "_orig_mod", None), torch.nn.Module):
            model = model._orig_mod
        else:
            return model


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The torch optimizer inside Accelerate's or Lightning's."""
    for name in ("AcceleratedOptimizer", "LightningOptimizer"):
        inside = optimizer.__dict__.get("optimizer", optimizer.__dict__.get("_optimizer"))
        if any(kind.__name__ == name for kind in type(optimizer).__mro__) and isinstance(inside, Optimizer):
            return inside
    return optimizer


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raises where FSDP has cut the parameters up: it moves and replaces them itself."""
    for module in model.modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"FullyShardedDataParallel", "FSDPModule"}:
            raise ValueError(
                f"{type(module).__name__} is sharded by FSDP, which moves its parameters itself: misa cannot manage them as "
                "well. Use DistributedDataParallel with misa, or FSDP without it. Nothing was changed."
            )
    for name, parameter in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
            raise ValueError(
                f"Parameter {name} is a DTensor, spread over several processes: misa manages whole tensors only. Use "
                "DistributedDataParallel with misa. Nothing was changed."
            )


def world_size() -> int:
    """Processes of this job in torch.distributed."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 1
    return torch.distributed.get_world_size()
