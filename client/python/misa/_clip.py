"""Clipping and unscaling of gradients, one by one: torch's own hand every gradient to one operator, so all would have to fit
at once."""

from __future__ import annotations

import contextlib
from typing import Any, Iterator

import torch


class _OneByOne:
    """torch's groups of gradients of one device and type, each cut into groups of one."""

    def __init__(self, groups: dict[Any, Any]) -> None:
        self._groups = groups

    def items(self) -> Iterator[tuple[Any, tuple[list[list[torch.Tensor]], list[int]]]]:
        for key, ([tensors], places) in self._groups.items():
            for tensor in tensors:
                yield key, ([[tensor]], places[:1])


@contextlib.contextmanager
def by_module(run: Any) -> Iterator[None]:
    """While open, torch's clipping functions and GradScaler handle one gradient at a time, with the same bits as before.

    They are changed inside, in what they group gradients by and take norms with, so that names imported before
    (`from torch.nn.utils import clip_grad_norm_`) are changed too.
    """
    inside = torch.nn.utils.clip_grad
    unscale_grads = torch.amp.GradScaler._unscale_grads_
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    group, total_norm = inside._group_tensors_by_device_and_dtype, inside._get_total_norm

    def group_one_by_one(nested: list[list[torch.Tensor]], *arguments: Any) -> _OneByOne:
        if not nested[0]:
            run.refuse_early("clip gradients")
        return _OneByOne(group(nested, *arguments))

    def total_norm_or_refusal(tensors: Any, *arguments: Any, **options: Any) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if not tensors:
            run.refuse_early("clip gradients")
        return total_norm(tensors, *arguments, **options)

    def unscale_one_by_one(tensors: Any, found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        for tensor in tensors:
            unscale([tensor], found_inf, inverse_scale)

    def unscale_or_refusal(scaler: Any, *arguments: Any) -> Any:
        run.refuse_early("unscale gradients")
        return unscale_grads(scaler, *arguments)

    torch.amp.GradScaler._unscale_grads_ = unscale_or_refusal
    torch._amp_foreach_non_finite_check_and_unscale_ = unscale_one_by_one
    inside._group_tensors_by_device_and_dtype = group_one_by_one
    inside._get_total_norm = total_norm_or_refusal
    try:
        yield
    finally:
        inside._group_tensors_by_device_and_dtype = group
        inside._get_total_norm = total_norm
        torch._amp_foreach_non_finite_check_and_unscale_ = unscale
        torch.amp.GradScaler._unscale_grads_ = unscale_grads
