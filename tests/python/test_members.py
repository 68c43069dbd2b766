"""Parameters that come to a managed model and leave it: managed from their first step on, gone with their last holder."""

from __future__ import annotations

import contextlib
import gc
from typing import Any

import misa
import pytest
import torch
from torch import nn

from tests.python.beside import assert_identical, digest
from tests.python.models import Mlp, loss_of
from tests.python.processes import MIB, Misad
from tests.python.small_training import manage, mlp, train

STEPS = 2


class Grown(nn.Module):
    """Two matrices and a bias beside a block."""

    def __init__(self, base: nn.Linear, rank: int = 72) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=draw) / 8)
        self.up = nn.Parameter(torch.randn(base.out_features, rank, generator=draw) / 8)
        self.shift = nn.Parameter(torch.zeros(base.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t() + self.shift

    def own(self) -> list[nn.Parameter]:
        return [self.down, self.up, self.shift]


def grow(model: Mlp, optimizer: Any, number: int, **options: Any) -> None:
    model.blocks[number] = Grown(model.blocks[number], **options)
    optimizer.add_param_group({"params": model.blocks[number].own(), "lr": 1e-2})


def shrink(model: Mlp, optimizer: Any, number: int) -> None:
    """Folded into the block, as adapters are; nobody holds the new part afterwards."""
    grown = model.blocks[number]
    with torch.no_grad():
        grown.base.weight += grown.up @ grown.down
        grown.base.bias += grown.shift
    model.blocks[number] = grown.base
    for parameter in optimizer.param_groups.pop()["params"]:
        optimizer.state.pop(parameter, None)
    optimizer.zero_grad()


def held(run: misa.Run, words: str) -> list[str]:
    return [name for name, residency in run.states() if words in name and residency != "empty"]


def test_what_an_optimizer_is_given_later_is_managed(shared_misad, capfd):
    model, optimizer = mlp()
    with manage(shared_misad, model, optimizer) as run:
        train(model, optimizer, range(1))
        run.flush()
        optimizer.zero_grad()
        before = misa._C.other_bytes()
        grow(model, optimizer, 2)
        new = model.blocks[2].own()
        assert not any(run._manager.is_managed(p) for p in new)
        train(model, optimizer, range(1, 3))
        run.flush()
        assert all(run._manager.is_managed(p) for p in new)
        assert all(run._manager.is_managed(optimizer.state[p]["exp_avg"]) for p in new[:2])
        assert held(run, "blocks.2.down optimizer state") and held(run, "blocks.2.up weights")
        assert "blocks.2.down" in [module["name"] for module in run.modules()]
        assert run.unload_all()
        assert all(residency in ("disk", "empty") for _, residency in run.states())
        optimizer.zero_grad()
        gc.collect()
        # Of the new part, its state and its gradients nothing is left in ordinary memory but counters.
        assert misa._C.other_bytes() < before + 16384
        assert run.adopt() == []
    run.release()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("step", ["deferred", "in_backward", "eager"])
def test_parts_that_come_and_go_have_plains_bits(shared_misad, step):
    def loop(managing: Any) -> Any:
        model, optimizer = mlp()
        seen = []
        with managing(model, optimizer) as run:
            done = 0
            for rounds in range(3):
                train(model, optimizer, range(done, done + STEPS))
                grow(model, optimizer, 1, rank=72 + 40 * (rounds % 2))
                grow(model, optimizer, 4)
                train(model, optimizer, range(done + STEPS, done + 2 * STEPS))
                seen.append([p.abs().sum().item() for p in model.blocks[4].own()])
                shrink(model, optimizer, 4)
                shrink(model, optimizer, 1)
                done += 2 * STEPS
            train(model, optimizer, range(done, done + STEPS))
            if run is not None:
                gc.collect()
                assert not held(run, "down") and not held(run, "blocks.4.up")
        return model, optimizer, seen

    for pressure in ("tight", "stress"):
        assert_identical(loop, shared_misad, pressure, step=step, share=0.7)


def test_what_has_left_is_free_and_its_place_is_used_again(misad):
    model, optimizer = mlp()
    with manage(misad, model, optimizer) as run:
        train(model, optimizer, range(1))
        facets, disk = 0, 0
        for rounds in range(4):
            grow(model, optimizer, 2)
            train(model, optimizer, range(1, 4))
            run.flush()
            assert len(held(run, "blocks.2.down")) + len(held(run, "blocks.2.up")) >= 4
            parts = run.report()["parameter_count"]
            shrink(model, optimizer, 2)
            train(model, optimizer, range(4, 5))
            gc.collect()
            assert held(run, "blocks.2.down") == held(run, "blocks.2.up") == []
            assert run.report()["parameter_count"] == parts - 2 * 72 * 128 - 128
            if rounds == 0:
                facets, disk = len(run.states()), misad.pool("disk")["leased"]
        # Those of the same shape take the places of the first, in memory and on the disk.
        assert (len(run.states()), misad.pool("disk")["leased"]) == (facets, disk)
        assert "trainer_problem" not in misad.events()
    run.release()


def test_what_is_still_held_stays_usable_after_it_has_left(shared_misad):
    def loop(managing: Any) -> list[Any]:
        model, optimizer = mlp()
        with managing(model, optimizer) as run:
            train(model, optimizer, range(2))
            kept, model.blocks[3] = model.blocks[3], nn.Identity()
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if not any(p is q for q in kept.parameters())]
            train(model, optimizer, range(2, 4))
            seen = [p.sum().item() for p in kept.parameters()]
            # It comes back under another name.
            model.blocks.append(kept)
            optimizer.add_param_group({"params": list(kept.parameters())})
            train(model, optimizer, range(4, 7))
            if run is not None:
                assert all(run._manager.is_managed(p) for p in kept.parameters())
            return [*seen, digest(model, optimizer)]

    assert loop(lambda m, o: manage(shared_misad, m, o, stress=True)) == loop(lambda *_: contextlib.nullcontext())


def test_a_part_that_leaves_without_a_word_is_found(shared_misad, monkeypatch):
    monkeypatch.setattr(misa._members, "_STEPS_BETWEEN_LOOKS", 2)
    model, optimizer = mlp()
    model.extra = nn.Linear(128, 128)
    with manage(shared_misad, model, optimizer) as run:
        train(model, optimizer, range(1))
        assert held(run, "extra weights")
        del model.extra
        train(model, optimizer, range(1, 4))
        gc.collect()
        assert not held(run, "extra weights")
    run.release()


def test_frozen_parts_come_by_a_call(shared_misad):
    model, optimizer = mlp()
    with manage(shared_misad, model, optimizer) as run:
        train(model, optimizer, range(1))
        model.teacher = Mlp(layers=2)
        for parameter in model.teacher.parameters():
            parameter.requires_grad_(False)
        train(model, optimizer, range(1, 2))
        weight = model.teacher.blocks[1].weight
        expected = weight.sum().item()
        assert not run._manager.is_managed(weight)
        assert "teacher.blocks.1.weight" in run.adopt()
        assert run._manager.is_managed(weight) and run.unload_all()
        assert weight.sum().item() == expected
        train(model, optimizer, range(2, 3))
    run.release()
    with pytest.raises(RuntimeError, match="ended"):
        run.adopt()


def test_a_new_part_of_an_old_name(shared_misad):
    """A head that is replaced, while the old one is still held by the optimizer."""

    def loop(managing: Any) -> str:
        model, optimizer = mlp()
        with managing(model, optimizer) as run:
            train(model, optimizer, range(2))
            torch.manual_seed(5)
            model.blocks[2] = nn.Linear(128, 128)
            optimizer.add_param_group({"params": list(model.blocks[2].parameters())})
            train(model, optimizer, range(2, 5))
            if run is not None:
                names = [module["name"] for module in run.modules()]
                assert "blocks.2" in names and "blocks.2#2" in names
            return digest(model, optimizer)

    assert loop(lambda m, o: manage(shared_misad, m, o)) == loop(lambda *_: contextlib.nullcontext())


@pytest.mark.parametrize("why", ["disk", "daemon"])
def test_where_they_cannot_be_managed_they_train_all_the_same(folder, capfd, why):
    def loop(managing: Any, before_growing: Any) -> str:
        model, optimizer = mlp()
        with managing(model, optimizer) as run:
            train(model, optimizer, range(1))
            before_growing()
            model.extra = Mlp(width=128, layers=8)
            optimizer.add_param_group({"params": list(model.extra.parameters())})
            for step in range(1, 4):
                optimizer.zero_grad()
                (loss_of(model, step) + loss_of(model.extra, step)).backward()
                optimizer.step()
            if run is not None:
                assert not any(run._manager.is_managed(p) for p in model.extra.parameters())
                assert run.adopt() == []
            return digest(model, optimizer)

    expected = loop(lambda *_: contextlib.nullcontext(), lambda: None)
    with Misad(folder, disk_capacity=3 * MIB if why == "disk" else 64 * MIB) as misad:
        assert loop(lambda m, o: manage(misad, m, o), misad.kill if why == "daemon" else lambda: None) == expected
    said = capfd.readouterr().err
    assert "stay in ordinary memory" in said and "extra.blocks.0.weight" in said and "exactly all the same" in said


def test_what_comes_later_keeps_to_the_budget(shared_misad):
    model, optimizer = mlp(layers=8)
    train(model, optimizer, range(1))
    gc.collect()
    budget = misa.memory.live_bytes() + MIB // 4
    with manage(shared_misad, model, optimizer, budget=budget) as run:
        train(model, optimizer, range(1, 3))
        for number in (1, 3, 5):
            grow(model, optimizer, number)
            train(model, optimizer, range(3, 6))
        assert misa.memory.peak_bytes() <= budget
        assert run.report()["notices"] == []
    run.release()


def test_mode_sampled_trains_what_comes_later(shared_misad):
    """In every round, and outside the draws."""
    options = {"delta": 0.5, "inner_steps": 2, "seed": 3}

    def loop(managing: Any) -> str:
        model, optimizer = mlp()
        with managing(model, optimizer):
            train(model, optimizer, range(2))
            grow(model, optimizer, 2)
            train(model, optimizer, range(2, 7))
        return digest(model, optimizer)

    expected = loop(lambda m, o: misa.SampledReference(m, o, **options))
    assert loop(lambda m, o: manage(shared_misad, m, o, mode="sampled", sampled=misa.Sampled(**options))) == expected
