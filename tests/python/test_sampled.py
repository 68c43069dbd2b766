"""Mode "sampled" ends in the bits of the plain reference loop that makes the same draws."""

from __future__ import annotations

import functools
from typing import Any

import misa
import pytest
import torch

from tests.python.beside import PRESSURES, assert_identical
from tests.python.models import Mlp, Transformer, loss_of

OPTIONS = {"delta": 0.3, "inner_steps": 2, "seed": 3}


def sampled_loop(name: str, clip: bool, steps: int, make: Any = torch.optim.AdamW, model_type: Any = Transformer,
                 **changes: Any) -> tuple[Any, dict[str, Any]]:
    options = {**OPTIONS, **changes}

    def loop(manage: Any) -> tuple[Any, Any, list[Any]]:
        torch.manual_seed(7)
        model = model_type()
        optimizer = make(model.parameters(), lr=3e-3)
        seen: list[Any] = []
        run = manage(model, optimizer)
        if run.__class__.__name__ == "nullcontext":
            run = misa.SampledReference(model, optimizer, **options)
        with run as managed:
            for step in range(steps):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                if clip:
                    seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2).item())
                optimizer.step()
                seen.append((loss.item(), [p.requires_grad for p in model.parameters()]))
            seen.append(sorted(i for i, p in enumerate(model.parameters()) if p in optimizer.state) if managed is None else [])
        assert all(p.requires_grad for p in model.parameters())
        return model, optimizer, seen

    loop.__name__ = name
    return loop, options


CASES = {
    "rounds": sampled_loop("rounds", False, 7),
    "clipped": sampled_loop("clipped", True, 6),
    "always": sampled_loop("always", False, 6, always=("embedding", "norm", "small")),
    "long-rounds": sampled_loop("long-rounds", False, 7, inner_steps=3, delta=0.6, eta=2.0, alpha=0.5, seed=11),
    "uniform": sampled_loop("uniform", False, 6, inner_steps=1, eta=0.0),
    "sgd": sampled_loop("sgd", False, 6, make=functools.partial(torch.optim.SGD, momentum=0.9)),
    "amsgrad": sampled_loop("amsgrad", False, 6, make=functools.partial(torch.optim.AdamW, amsgrad=True)),
    "mlp": sampled_loop("mlp", True, 7, model_type=Mlp, delta=0.5),
}


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize(("case", "step"), [
    (case, step) for case in CASES for step in ("deferred", "eager", "in_backward")
    if step != "in_backward" or case not in ("clipped", "mlp")  # which clip
])
def test_as_the_reference(shared_misad, case, step, pressure):
    loop, options = CASES[case]
    assert_identical(loop, shared_misad, pressure, share=0.7, step=step, mode="sampled", sampled=misa.Sampled(**options))


def test_rounds_draw_different_modules_within_the_share(shared_misad):
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    rounds = []
    with misa.SampledReference(model, optimizer, **OPTIONS) as reference:
        for step in range(10):
            trained = {n for n, p in model.named_parameters() if p.requires_grad}
            assert trained
            if step % 2 == 0:
                rounds.append(tuple(reference.active_modules))
                blocks = [p for n, p in model.named_parameters() if n.startswith("blocks") and p.dim() == 2]
                share = sum(p.numel() for p in blocks if p.requires_grad) / sum(p.numel() for p in blocks)
                assert 0 < share <= OPTIONS["delta"]
            optimizer.zero_grad()
            loss_of(model, step).backward()
            assert {n for n, p in model.named_parameters() if p.grad is not None} == trained
            optimizer.step()
    assert len(set(rounds)) > 1


def test_a_share_below_the_smallest_module_is_refused_and_names_it(shared_misad):
    def attempt(delta: float) -> Any:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters())
        with misa.manage(model, optimizer, budget="64MiB", mode="sampled", sampled=misa.Sampled(delta=delta),
                         runtime_dir=str(shared_misad.runtime_dir)) as run:
            optimizer.zero_grad()
            loss_of(model, 0).backward()
            optimizer.step()
            return run.report()

    # The matrices of three blocks; the smallest is one of 4 + 2 * 2 equal parts of a block.
    smallest = 1 / 24
    with pytest.raises(ValueError, match=r"delta|share") as caught:
        attempt(smallest * 0.5)
    assert misa.current_run() is None
    numbers = [float(w.strip(".,:;()%")) for w in str(caught.value).split() if w.strip(".,:;()%").replace(".", "", 1).isdigit()]
    named = [n for n in numbers if abs(n - smallest) < 1e-3 or abs(n - 100 * smallest) < 0.1]
    assert named, str(caught.value)
    assert attempt(smallest * 1.0001)["mode"] == "sampled"


@pytest.mark.parametrize("options", [{"delta": 0.0}, {"delta": 1.5}, {"eta": -1.0}, {"alpha": 0.0}, {"inner_steps": 0}])
def test_impossible_options_are_refused(shared_misad, options):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        misa.manage(model, optimizer, budget="64MiB", mode="sampled", sampled=misa.Sampled(**options),
                    runtime_dir=str(shared_misad.runtime_dir))
    assert misa.current_run() is None
    assert all(p.requires_grad for p in model.parameters())
