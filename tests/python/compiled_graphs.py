"""Graphs compiled by Inductor, for `make test-compiled`: the compiler alone takes half a minute."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from torch import nn

from tests.python.beside import assert_identical
from tests.python.models import Mlp, batch


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
def test_graphs_compiled_by_inductor(shared_misad, monkeypatch, tmp_path):
    """Forward and backward kernels take raw pointers. The budget holds less than one graph's inputs the second time."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def loop(manage: Any) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(7)
        model = Mlp(layers=2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        forward = torch.compile(model)
        seen = []
        with manage(model, optimizer):
            for step in range(3):
                inputs, targets = batch(model, step)
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(forward(inputs), targets)
                loss.backward()
                optimizer.step()
                seen.append(loss.item())
        return model, optimizer, seen

    assert_identical(loop, shared_misad, "stress", key=("inductor", 0))
    assert_identical(loop, shared_misad, "tight", key=("inductor", 0), share=0.6)
