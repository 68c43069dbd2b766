"""The faults that systems of this kind are known for, one test each: what is right here, and a small naive way to do it that
has the fault, so that each test can fail."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import threading
from pathlib import Path
from typing import Any, Callable, Iterator

import misa
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.python.beside import assert_identical, digest, plain_once
from tests.python.models import Mlp, Transformer, batch, loss_of
from tests.python.processes import Misad, TrainerProcess
from tests.python.small_training import manage, mlp, train

STEPS = 3


def same(loop: Callable[..., Any], misad: Misad, **options: Any) -> None:
    """The bits and the looks of plain training, at half of its memory and with everything sent away at every touch."""
    for pressure in ("tight", "stress"):
        assert_identical(loop, misad, pressure, **options)


@contextlib.contextmanager
def plainly(*_: Any, **__: Any) -> Iterator[None]:
    yield


class NaiveOffload:
    """How such a thing is usually written: hooks on modules bring weights in before a module's forward and take them out after
    it, and again around its backward. `steps` is the fault's own addition where it needs one."""

    def __init__(self, model: nn.Module) -> None:
        self.host: dict[nn.Module, dict[str, torch.Tensor]] = {}
        self.loaded: set[nn.Module] = set()
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False))
            if not own:
                continue
            self.host[module] = {name: p.detach().clone() for name, p in own.items()}
            module.register_forward_pre_hook(lambda m, _: self.load(m))
            module.register_forward_hook(lambda m, _, out: self.unload(m))
            self.unload(module)

    def load(self, module: nn.Module) -> None:
        for name, p in module.named_parameters(recurse=False):
            p.data = self.host[module][name]
        self.loaded.add(module)

    def unload(self, module: nn.Module) -> None:
        for _, p in module.named_parameters(recurse=False):
            p.data = torch.empty(0)
        self.loaded.discard(module)


# 1 ------------------------------------------------------------------------------------------------------------------


def test_01_training_runs_but_the_weights_never_move(shared_misad):
    def moved(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
        return all(not torch.equal(before[name], after[name]) for name in before)

    def state(model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        before = state(model)
        with manage(model, optimizer):
            train(model, optimizer, range(STEPS))
            seen = [moved(before, state(model))]
        return model, optimizer, seen

    assert plain_once(loop).seen == [True]
    same(loop, shared_misad, share=0.7)

    # Naive: dispatch for inference. Weights are copied in for each forward, the copies train, nothing is ever written back.
    model, optimizer = mlp()
    before = state(model)
    for step in range(STEPS):
        inputs, targets = batch(model, step)
        optimizer.zero_grad()
        copies = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        F.cross_entropy(torch.func.functional_call(model, copies, inputs), targets).backward()
        optimizer.step()
    assert not moved(before, state(model))


# 2 ------------------------------------------------------------------------------------------------------------------


def test_02_tied_weights_are_untied_or_owned_twice(shared_misad):
    def loop(manage: Any) -> Any:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with manage(model, optimizer) as run:
            train(model, optimizer, range(STEPS))
            tied = model.head.weight is model.embedding.weight
            one = model.head.weight.data_ptr() == model.embedding.weight.data_ptr()
            if run is not None:
                names = [n for module in run.modules() for n in module["parameters"]]
                assert sorted(names) == sorted(n for n, _ in model.named_parameters())
                bytes_ = 4 * sum(p.numel() for p in model.parameters())
                assert bytes_ <= run.report()["weights_bytes"] <= bytes_ + 64 * len(names)
        return model, optimizer, [tied, one]

    assert plain_once(loop).seen == [True, True]
    same(loop, shared_misad)

    # Naive: one copy for each name.
    torch.manual_seed(7)
    model = Transformer()
    owned = {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}
    assert owned["head.weight"].data_ptr() != owned["embedding.weight"].data_ptr()
    assert sum(t.numel() for t in owned.values()) > sum(p.numel() for p in model.parameters())


# 3 ------------------------------------------------------------------------------------------------------------------


def shared_and_recomputed() -> tuple[nn.Linear, nn.Linear]:
    torch.manual_seed(7)
    return nn.Linear(96, 96), nn.Linear(96, 16)


def shared_loss(layer: nn.Linear, head: nn.Linear, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(4, 96, generator=draw).requires_grad_()
    for _ in range(3):
        x = checkpoint(lambda t: torch.tanh(layer(t)), x, use_reentrant=True)
    return head(x).square().mean()


def test_03_a_shared_weight_under_checkpointing_fires_its_hook_twice(shared_misad):
    def loop(manage: Any) -> Any:
        model = nn.ModuleList(shared_and_recomputed())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        with manage(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                shared_loss(*model, step).backward()
                optimizer.step()
        return model, optimizer, []

    misa_bits = plain_once(loop).sha256
    model = nn.ModuleList(shared_and_recomputed())
    run = manage(shared_misad, model, optimizer := torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), stress=True)
    for step in range(STEPS):
        optimizer.zero_grad()
        shared_loss(*model, step).backward()
        optimizer.step()
    assert digest(model, optimizer) == misa_bits
    run.release()

    # Where a step at the first gradient was asked for, it is a sentence.
    model = nn.ModuleList(shared_and_recomputed())
    run = manage(shared_misad, model, torch.optim.SGD(model.parameters(), lr=0.5), step="in_backward")
    with pytest.raises(RuntimeError, match="second gradient.*reentrant"):
        shared_loss(*model, 0).backward()
    run.release()

    # Naive: a step in the hook, each time it fires.
    model = nn.ModuleList(shared_and_recomputed())
    fired = 0

    def step_now(parameter: torch.Tensor) -> None:
        nonlocal fired
        fired += parameter is model[0].weight
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.5)
        parameter.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    shared_loss(*model, 0).backward()
    assert fired == 3


# 4, 5, 6 ------------------------------------------------------------------------------------------------------------


class NaivePrefetch:
    """Records the order of the first step and from then on brings the next module in while one runs."""

    def __init__(self, model: nn.Module) -> None:
        self.order: list[nn.Module] = []
        self.in_flight: list[nn.Module] = []
        self.recording = True
        self.at = 0
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, _: self.before(m))

    def before(self, module: nn.Module) -> None:
        if self.recording:
            self.order.append(module)
            return
        if self.in_flight and self.in_flight.pop(0) is not module:
            raise RuntimeError("the order differs from the trace")
        self.at += 1
        if self.at < len(self.order):
            self.in_flight.append(self.order[self.at])

    def end_step(self) -> None:
        self.recording = False
        self.at = 0
        if self.in_flight:
            raise RuntimeError("still have inflight params")


def branching(model: Mlp, step: int, runs: Callable[[int], bool]) -> torch.Tensor:
    h, targets = batch(model, step)
    for number, block in enumerate(model.blocks):
        if runs(number):
            h = torch.tanh(block(h))
    return F.cross_entropy(model.head(h), targets)


def planned(loop: Callable[..., Any], misad: Misad) -> dict[str, Any]:
    """The loop under a budget that makes it live by its plan."""
    expected = plain_once(loop)
    gc.collect()
    kept = {}

    @contextlib.contextmanager
    def manage_(model: Any, optimizer: Any) -> Iterator[misa.Run]:
        run = manage(misad, model, optimizer, budget=misa.memory.live_bytes() + expected.bytes // 2 - 4 * sum(
            p.numel() for p in model.parameters()) // 4)
        try:
            yield run
            assert misa.memory.peak_bytes() <= run.budget_bytes
            kept.update(run.report())
            assert "loading" not in dict(run.states()).values() or run._manager.unload_all()
            assert digest(model, optimizer) == expected.sha256
        finally:
            run.release()

    loop(manage_)
    return kept


def test_04_a_branch_skips_a_module_whose_prefetch_is_in_flight(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer):
            for step in range(12):
                optimizer.zero_grad()
                branching(model, step, lambda number: step < 8 or (step + number) % 3 != 0).backward()
                optimizer.step()
        return model, optimizer, []

    planned(loop, shared_misad)
    same(loop, shared_misad)

    model, optimizer = mlp()
    naive = NaivePrefetch(model)
    branching(model, 0, lambda number: True)
    naive.end_step()
    with pytest.raises(RuntimeError, match="inflight|differs"):
        branching(model, 1, lambda number: number < 2)
        naive.end_step()


def test_05_the_order_differs_from_the_trace(shared_misad):
    def ordered(model: Mlp, step: int, order: list[int]) -> torch.Tensor:
        h, targets = batch(model, step)
        for number in order:
            h = torch.tanh(model.blocks[number](h))
        return F.cross_entropy(model.head(h), targets)

    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer):
            for step in range(12):
                optimizer.zero_grad()
                ordered(model, step, [0, 1, 2, 3, 4, 5] if step < 8 or step == 10 else [5, 3, 4, 0, 2, 1]).backward()
                optimizer.step()
        return model, optimizer, []

    report = planned(loop, shared_misad)
    assert report["notices"] == []  # no warning at every step
    same(loop, shared_misad)

    model, _ = mlp()
    naive = NaivePrefetch(model)
    ordered(model, 0, [0, 1, 2, 3, 4, 5])
    naive.end_step()
    with pytest.raises(RuntimeError, match="differs"):
        ordered(model, 1, [0, 2, 1, 3, 4, 5])


def test_06_evaluation_and_generation_invalidate_the_trace(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        seen = []
        with manage(model, optimizer):
            for step in range(12):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
                if step % 3 == 2:
                    model.eval()
                    with torch.no_grad():
                        for _ in range(3):
                            seen.append(branching(model, 90, lambda number: number > 2).item())
                    model.train()
        return model, optimizer, seen

    report = planned(loop, shared_misad)
    assert report["notices"] == []
    same(loop, shared_misad)

    model, _ = mlp()
    naive = NaivePrefetch(model)
    loss_of(model, 0)
    naive.end_step()
    with pytest.raises(RuntimeError, match="differs"):
        branching(model, 90, lambda number: number > 2)


# 7 ------------------------------------------------------------------------------------------------------------------

RANK = """
import datetime, sys, torch, torch.distributed as dist, misa
from tests.python.models import Mlp, batch
rank = {rank}
dist.init_process_group("gloo", init_method="file://{folder}/meet", rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=30))
torch.manual_seed(7)
model = Mlp(layers=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
budget = misa.memory.live_bytes() + (160 << 10)
with misa.manage(model, optimizer, budget=budget, runtime_dir={runtime!r}, daemon="required") as run:
    for step in range(4):
        inputs, targets = batch(model, 2 * step + rank)
        h = inputs
        for number, expert in enumerate(model.blocks):
            if number % 2 == (rank + step) % 2:     # each rank has experts of its own
                h = torch.tanh(expert(h))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model.head(h), targets).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
        optimizer.step()
    print("sha256", misa.state_sha256(model, optimizer), flush=True)
    print("loads", run.report()["demand_loads"], flush=True)
dist.destroy_process_group()
"""


def test_07_ranks_that_activate_different_experts_wait_for_each_other(shared_misad, folder):
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(TrainerProcess(folder, program=RANK.format(
            rank=rank, folder=folder, runtime=str(shared_misad.runtime_dir)))) for rank in range(2)]
        hashes = {rank.line("sha256") for rank in ranks}
        assert min(int(rank.line("loads")) for rank in ranks) > 4
        for rank in ranks:
            rank.end()
    # The same bits on both, and those of one process that does both ranks' work.
    torch.manual_seed(7)
    model = Mlp(layers=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        gradients = []
        for rank in range(2):
            h, targets = batch(model, 2 * step + rank)
            for number, expert in enumerate(model.blocks):
                if number % 2 == (rank + step) % 2:
                    h = torch.tanh(expert(h))
            optimizer.zero_grad()
            F.cross_entropy(model.head(h), targets).backward()
            gradients.append([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])
        for p, first, second in zip(model.parameters(), *gradients):
            p.grad = first + second
        optimizer.step()
    assert hashes == {misa.state_sha256(model, optimizer)}

    # Naive: whoever needs a unit gathers it with everybody.
    gathers = [threading.Barrier(2) for _ in range(4)]
    waits = []

    def rank_of_naive(rank: int) -> None:
        for number in range(4):
            if number % 2 == rank % 2:
                try:
                    gathers[number].wait(timeout=0.3)
                except threading.BrokenBarrierError:
                    waits.append(number)

    threads = [threading.Thread(target=rank_of_naive, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(waits) == [0, 1, 2, 3]


# 8 ------------------------------------------------------------------------------------------------------------------


def test_08_a_second_backward_reads_freed_weights(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer) as run:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward(retain_graph=True)
                if run is not None:
                    assert run.unload_all()
                (loss * 0.5).backward()
                optimizer.step()
        return model, optimizer, []

    same(loop, shared_misad)

    # Naive: free after use. The second backward has nothing to multiply with.
    model, _ = mlp()
    offload = NaiveOffload(model)
    with pytest.raises(RuntimeError):
        loss_of(model, 0).backward()
    assert offload.loaded == set()


@pytest.mark.parametrize("step", ["deferred", "eager"])
def test_08_a_backward_over_a_graph_of_before_the_step_is_torchs_error(shared_misad, step):
    """Not weights of after the step in silence, where the step is done later than step()."""
    for managed in (False, True):
        model, optimizer = mlp()
        run = manage(shared_misad, model, optimizer, step=step) if managed else None
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        if run is not None:
            run.release()


# 9 ------------------------------------------------------------------------------------------------------------------


def taken_away(model: nn.Module) -> dict[torch.Tensor, torch.Tensor]:
    """Each gradient goes into a place of its own as it comes."""
    places: dict[torch.Tensor, torch.Tensor] = {}

    def take(parameter: torch.Tensor) -> None:
        places[parameter] = parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    return places


def test_09_accumulation_drops_micro_batches(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        seen = []
        with manage(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                for part in range(4):
                    (loss_of(model, 4 * step + part) / 4).backward()
                seen.append(model.blocks[2].weight.grad.abs().sum().item())
                optimizer.step()
        return model, optimizer, seen

    same(loop, shared_misad)

    # Naive: a buffer for each gradient that the next one goes into.
    model, _ = mlp()
    buffers = taken_away(model)
    for part in range(4):
        (loss_of(model, part) / 4).backward()
    assert buffers[model.blocks[2].weight].abs().sum().item() != plain_once(loop).seen[0]


# 10 -----------------------------------------------------------------------------------------------------------------


def test_10_clipping_of_gradients_that_are_elsewhere(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        seen = []
        with manage(model, optimizer) as run:
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                if run is not None:
                    assert run.unload_all()
                seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
        return model, optimizer, seen

    assert all(norm > 0.1 for norm in plain_once(loop).seen)
    same(loop, shared_misad)

    # Naive: gradients move to the host as they come.
    model, _ = mlp()
    host = taken_away(model)
    loss_of(model, 0).backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == 0 and host


# 11 -----------------------------------------------------------------------------------------------------------------


def test_11_initialisation_repeats_random_values(shared_misad):
    def loop(manage: Any) -> Any:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen = [torch.get_rng_state().tolist()]
        with manage(model, optimizer):
            seen.append(torch.get_rng_state().tolist())
            late = nn.Linear(8, 8)  # made while managed
            nn.init.normal_(model.blocks[0].up.weight)
            nn.init.normal_(model.blocks[1].up.weight)
            train(model, optimizer, range(2))  # with dropout
            seen += [torch.get_rng_state().tolist(), late.weight.tolist()]
        return model, optimizer, seen

    assert plain_once(loop).seen[0] == plain_once(loop).seen[1]
    same(loop, shared_misad)

    # Naive: each module is made when it is needed, from the seed.
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(nn.Linear(8, 8).weight)
    assert torch.equal(*made)


# 12 -----------------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A 0-d, a transposed, a sliced, an integer, a half-precision and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(128, 96).t())
        self.sliced = nn.Parameter(torch.randn(96, 200)[:, ::2])
        self.numbers = nn.Parameter(torch.arange(2000), requires_grad=False)
        self.low = nn.Parameter(torch.randn(96, 96, dtype=torch.bfloat16))
        self.none = nn.Parameter(torch.empty(0, 7))
        self.wide = nn.ParameterList(torch.randn(96, 96) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scale * (x @ self.turned.t().t()[:, :96]) @ self.sliced[:, :96] + self.numbers[7]
        x = (x.bfloat16() @ self.low).float()
        for wide in self.wide:
            x = torch.tanh(x @ wide)
        return x + self.none.sum()


def test_12_scalars_strides_and_integers(shared_misad):
    def loop(manage: Any) -> Any:
        torch.manual_seed(7)
        model = Odd()
        shapes = [(p.shape, p.stride(), p.dtype) for p in model.parameters()]
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        with manage(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                draw = torch.Generator().manual_seed(step)
                model(torch.randn(4, 96, generator=draw)).square().mean().backward()
                optimizer.step()
        assert [(p.shape, p.stride(), p.dtype) for p in model.parameters()] == shapes
        return model, optimizer, [int(model.numbers.sum())]

    same(loop, shared_misad, share=0.7)

    # Naive: one flat buffer.
    with pytest.raises(RuntimeError, match="view"):
        torch.cat([p.view(-1) for p in Odd().parameters()])


# 13 -----------------------------------------------------------------------------------------------------------------


def test_13_buffers_are_forgotten(shared_misad):
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(5))
            self.norms = nn.ModuleList(nn.BatchNorm1d(128) for _ in range(5))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for layer, norm in zip(self.layers, self.norms):
                x = torch.tanh(norm(layer(x)))
            return x

    def run_steps(model: nn.Module, optimizer: Any) -> None:
        for step in range(STEPS):
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(step)
            model(torch.randn(4, 128, generator=draw)).square().mean().backward()
            optimizer.step()

    def loop(manage: Any) -> Any:
        torch.manual_seed(7)
        model = Normed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with manage(model, optimizer):
            run_steps(model, optimizer)
            seen = [b.tolist() for b in model.buffers()]
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.ones(2, 128)).tolist())
        return model, optimizer, seen

    same(loop, shared_misad)

    # Naive: modules are copied to the device for their turn, and their parameters back.
    torch.manual_seed(7)
    model = Normed()
    before = [b.tolist() for b in model.buffers()]
    for _ in range(STEPS):
        working = copy.deepcopy(model)
        working(torch.randn(4, 128)).square().mean().backward()
        for p, q in zip(model.parameters(), working.parameters()):
            p.data.copy_(q.data - 0.1 * q.grad)
    assert [b.tolist() for b in model.buffers()] == before != plain_once(loop).seen[:-1]


# 14 -----------------------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """LoRA around a layer."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features, generator=torch.Generator().manual_seed(3)) / 8)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The base's weight is used, its module is not called.
        return F.linear(x, self.base.weight, self.base.bias) + x @ self.down.t() @ self.up.t()


def test_14_adapters_are_added_and_removed(shared_misad):
    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer) as run:
            train(model, optimizer, range(2))
            # The base freezes, adapters come; they are small, and their optimizer is plain.
            for p in model.parameters():
                p.requires_grad_(False)
            for number in (1, 3):
                model.blocks[number] = Adapter(model.blocks[number])
            small = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            train(model, small, range(2, 4))
            seen = [model.blocks[number].up.abs().sum().item() for number in (1, 3)]
            for number in (1, 3):
                adapter = model.blocks[number]
                with torch.no_grad():
                    adapter.base.weight += adapter.up @ adapter.down
                model.blocks[number] = adapter.base
            for p in model.parameters():
                p.requires_grad_(True)
            train(model, optimizer, range(4, 6))
        return model, optimizer, seen

    assert all(value > 0 for value in plain_once(loop).seen)
    same(loop, shared_misad, share=0.7)

    # Naive: hooks sit on modules; whoever uses the weight without calling the module finds nothing.
    model, _ = mlp()
    NaiveOffload(model)
    model.blocks[1] = Adapter(model.blocks[1])
    with pytest.raises(RuntimeError):
        loss_of(model, 0)


# 15 -----------------------------------------------------------------------------------------------------------------


def test_15_copies_race_with_the_compute(shared_misad):
    """Weights change while their copy is on its way out; what comes back is what was written last. Under the events of the
    executor the unit tests hold each copy at its most awkward moment; here a whole run has no torn byte."""

    def leave(run: Any) -> None:
        if run is not None:
            run._manager.begin_unload()

    def loop(manage: Any) -> Any:
        model, optimizer = mlp(layers=4)
        seen = []
        with manage(model, optimizer) as run:
            for step in range(4):
                train(model, optimizer, range(step, step + 1))
                with torch.no_grad():
                    for block in model.blocks:
                        block.weight += 0.001
                        leave(run)  # begins to, and is written to before it has
                        block.weight *= 1.001
                        seen.append(block.weight.isnan().any().item())
        return model, optimizer, seen

    same(loop, shared_misad)

    # Naive: a thread copies to the host, nobody waits for it.
    weight = torch.zeros(1000)
    host = torch.empty(1000)
    half_way, go_on = threading.Event(), threading.Event()

    def copy_out() -> None:
        host[:500] = weight[:500]
        half_way.set()
        go_on.wait()
        host[500:] = weight[500:]

    thread = threading.Thread(target=copy_out)
    thread.start()
    half_way.wait()
    weight += 1  # the step
    go_on.set()
    thread.join()
    assert not torch.equal(host, torch.zeros(1000)) and not torch.equal(host, torch.ones(1000))


# 16 -----------------------------------------------------------------------------------------------------------------


def test_16_a_forward_without_backward_leaves_modules_in_the_wrong_place(shared_misad):
    class Stop(BaseException):
        pass

    def stop(*_: Any) -> None:
        raise Stop

    def loop(manage: Any) -> Any:
        model, optimizer = mlp()
        with manage(model, optimizer) as run:
            for step in range(STEPS):
                loss_of(model, 50)  # no backward
                handle = model.blocks[3].register_forward_pre_hook(stop)
                with contextlib.suppress(Stop):
                    loss_of(model, step)
                handle.remove()
                if run is not None:
                    # Nothing is held by what was interrupted.
                    assert run.unload_all()
                    assert set(dict(run.states()).values()) <= {"disk", "empty"}
                train(model, optimizer, range(step, step + 1))
        return model, optimizer, []

    same(loop, shared_misad)

    model, _ = mlp()
    offload = NaiveOffload(model)
    handle = model.blocks[3].register_forward_hook(stop, prepend=True)
    with contextlib.suppress(Stop):
        loss_of(model, 0)
    handle.remove()
    assert model.blocks[3] in offload.loaded  # for ever


# 17 -----------------------------------------------------------------------------------------------------------------


def test_17_sizes_are_rounded_up_to_powers_of_two(shared_misad):
    torch.manual_seed(7)
    # 36,864 floats a matrix, 144 KiB: a power of two would be 256 KiB.
    model = Mlp(width=192)
    model.blocks[0] = nn.Linear(128, 192)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = manage(shared_misad, model, optimizer)
    chunk = run.session()["chunk_bytes"]
    facets = len(run.modules())
    exact = sum(4 * p.numel() for p in model.parameters())
    assert dict(run.states())["blocks.3 weights"] == "device"
    assert exact <= misa._C.pool_bytes() <= exact + facets * chunk
    run.release()

    naive = sum(1 << (4 * p.numel() - 1).bit_length() for p in model.parameters())
    assert naive > 1.5 * (exact + facets * chunk)


def test_17_memory_that_cannot_be_had_is_named(folder):
    """The pool is full: the sentence says whose memory it is and how much was wanted."""
    with Misad(folder, capacity=1 << 20) as misad:
        model, optimizer = mlp()
        with pytest.raises(RuntimeError, match="pool"):
            manage(misad, model, optimizer, budget="64MiB")


# 18 -----------------------------------------------------------------------------------------------------------------


def test_18_saving_writes_empty_tensors(shared_misad, folder):
    plain_model, plain_optimizer = mlp()
    train(plain_model, plain_optimizer, range(2))
    gc.collect()
    base = misa.memory.live_bytes()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer, budget=base + (700 << 10))
    train(model, optimizer, range(2))
    assert run.unload_all()
    torch.save(model.state_dict(), folder / "model.pt")
    assert misa.memory.peak_bytes() <= run.budget_bytes
    run.release()
    saved = torch.load(folder / "model.pt")
    expected = plain_model.state_dict()
    assert saved.keys() == expected.keys() and all(torch.equal(saved[k], expected[k]) for k in saved)

    model, _ = mlp()
    NaiveOffload(model)
    torch.save(model.state_dict(), folder / "naive.pt")
    assert all(t.numel() == 0 for t in torch.load(folder / "naive.pt").values())


# 19 -----------------------------------------------------------------------------------------------------------------


def test_19_resume_loses_step_counters(shared_misad, folder):
    plain_model, plain_optimizer = mlp()
    train(plain_model, plain_optimizer, range(4))
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    train(model, optimizer, range(2))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
    run.release()
    del model, optimizer

    def resume(change: Callable[[dict[str, Any]], None] = lambda _: None) -> tuple[nn.Module, Any]:
        saved = torch.load(folder / "saved.pt")
        change(saved)
        model, optimizer = mlp()
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        return model, optimizer

    for before in (True, False):
        if before:
            model, optimizer = resume()
            run = manage(shared_misad, model, optimizer)
        else:
            saved = torch.load(folder / "saved.pt")
            model, optimizer = mlp()
            run = manage(shared_misad, model, optimizer)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        train(model, optimizer, range(2, 4))
        assert digest(model, optimizer) == digest(plain_model, plain_optimizer)
        assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}
        run.release()

    # Naive: tensors of a parameter's size are saved, the counters begin again.
    def forget(saved: dict[str, Any]) -> None:
        for state in saved["optimizer"]["state"].values():
            state["step"] = torch.tensor(0.0)

    model, optimizer = resume(forget)
    train(model, optimizer, range(2, 4))
    assert digest(model, optimizer) != digest(plain_model, plain_optimizer)


# 20 -----------------------------------------------------------------------------------------------------------------


def test_20_a_used_folder_serves_the_previous_models_weights(misad, folder):
    """The same folder, shapes and names; another seed."""

    def loop(manage: Any, seed: int) -> str:
        torch.manual_seed(seed)
        model = Mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with manage(model, optimizer) as run:
            train(model, optimizer, range(2))
            if run is not None:
                assert run.unload_all()
            result = digest(model, optimizer)
        if run is not None:
            run.release()
        return result

    for seed in (1, 2):
        assert loop(lambda m, o: manage(misad, m, o), seed) == loop(plainly, seed)
        assert [f for f in misad.disk.rglob("*") if f.is_file()] == []  # nothing with a name stays

    # Naive: a file for each parameter's name, written where there is none yet.
    def offloaded(seed: int, place: Path) -> torch.Tensor:
        torch.manual_seed(seed)
        weight = nn.Linear(4, 4).weight
        if not (place / "weight.pt").exists():
            torch.save(weight, place / "weight.pt")
        return torch.load(place / "weight.pt")

    assert torch.equal(offloaded(1, folder), offloaded(2, folder))


# 21 -----------------------------------------------------------------------------------------------------------------


class Reports(torch.utils.data.Dataset):
    """Items say what the worker that makes them has: managed mappings, and whether a managed tensor can be had there."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, str]:
        mapped = Path("/proc/self/maps").read_text().count("memfd:misa")
        try:
            self.model.blocks[index].weight.sum().item()
            return mapped, "read it"
        except Exception as error:  # noqa: BLE001: which one is torch's choice
            return mapped, str(error)


def test_21_forked_workers_inherit_everything(shared_misad):
    plain_model, plain_optimizer = mlp()
    train(plain_model, plain_optimizer, range(4))
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    train(model, optimizer, range(2))
    assert Path("/proc/self/maps").read_text().count("memfd:misa") > 0
    items = list(torch.utils.data.DataLoader(Reports(model), batch_size=None, num_workers=2))
    assert len(items) == 4
    for mapped, text in items:
        assert mapped == 0 and "in the process that was forked from" in text, (mapped, text)
    train(model, optimizer, range(2, 4))
    run.release()
    assert digest(model, optimizer) == digest(plain_model, plain_optimizer)

    # Naive: shared memory for the pool. The worker has it, and what it does there is done to the parent.
    pool = torch.zeros(8).share_memory_()
    pid = os.fork()
    if pid == 0:
        pool[0] = 1
        os._exit(0)
    os.waitpid(pid, 0)
    assert pool[0] == 1
