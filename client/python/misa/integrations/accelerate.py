"""Accelerate: `misa.manage` after `accelerator.prepare`, with the same arguments.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    with misa.manage(model, optimizer, budget="8GiB"):
        ...the same loop, accelerator.backward(loss) and all...

`misa.manage` takes off what Accelerate wraps around optimizers. What is here is for `accelerator.log`.
"""

from __future__ import annotations

from typing import Any

from .._manage import Run
from ._figures import Figures


class Logged:
    """Adds misa's entries to what a script logs: `accelerator.log(logged({"loss": loss}), step=step)`."""

    def __init__(self, run: Run) -> None:
        self._figures = Figures(run)

    def __call__(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**values, **self._figures.take()}
