"""Gradient clipping, module by module: torch's own hands every gradient to one operator, so all would have to fit at once."""

from __future__ import annotations

import contextlib
from typing import Any, Iterable, Iterator

import torch


def _gradients(parameters: Any) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    return [p.grad for p in parameters if p.grad is not None]


def _norm_of(tensors: list[torch.Tensor], norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    # As torch's: the norm of the norms, each computed by the same operator.
    if not tensors:
        return torch.tensor(0.0)
    norms = [torch.linalg.vector_norm(t, norm_type) for t in tensors]
    total = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]), norm_type)
    if error_if_nonfinite and torch.logical_or(total.isnan(), total.isinf()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. "
            "To disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    return total


@contextlib.contextmanager
def clipping_by_module(run: Any) -> Iterator[None]:
    """While open, `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` handle one gradient at a time, with the same bits
    as before."""
    utils = torch.nn.utils
    names = ("clip_grad_norm_", "clip_grad_value_")
    originals = {name: getattr(utils, name) for name in names}

    @torch.no_grad()
    def clip_grad_norm_(
        parameters: torch.Tensor | Iterable[torch.Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        gradients = _gradients(list(parameters) if not isinstance(parameters, torch.Tensor) else parameters)
        total = _norm_of(gradients, float(norm_type), error_if_nonfinite)
        coefficient = torch.clamp(float(max_norm) / (total + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(coefficient)
        return total

    @torch.no_grad()
    def clip_grad_value_(
        parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float, foreach: bool | None = None
    ) -> None:
        for gradient in _gradients(list(parameters) if not isinstance(parameters, torch.Tensor) else parameters):
            gradient.clamp_(min=-float(clip_value), max=float(clip_value))

    replacements = {"clip_grad_norm_": clip_grad_norm_, "clip_grad_value_": clip_grad_value_}
    for name in names:
        setattr(utils, name, replacements[name])
        setattr(utils.clip_grad, name, replacements[name])
    try:
        yield
    finally:
        for name in names:
            setattr(utils, name, originals[name])
            setattr(utils.clip_grad, name, originals[name])
