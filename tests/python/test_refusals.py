"""What can go wrong for a user: each a sentence, and nothing is lost."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import re
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import misa
import pytest
import torch
from torch import nn

from tests.python.beside import digest
from tests.python.models import Mlp, Transformer, loss_of
from tests.python.processes import MIB, Misad, TrainerProcess
from tests.python.small_training import manage, mlp, train


@functools.cache
def after(steps: int) -> str:
    """What plain training gives; asked for before something is managed, whose budget would count it."""
    model, optimizer = mlp()
    train(model, optimizer, range(steps))
    return digest(model, optimizer)


def a_sentence(text: str) -> bool:
    """Words for people, not a code or a type."""
    return len(text.split()) > 6


# --------------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize("step", ["deferred", "eager", "in_backward"])
def test_a_budget_below_one_operators_need_names_the_smallest_that_works(shared_misad, step):
    """Follows the sentence until it works: it must get there, and what was trained must be right."""
    expected = after(3)
    gc.collect()
    live = misa.memory.live_bytes()
    budget = live + (100 << 10)
    refusals = []
    for _ in range(20):
        model, optimizer = mlp()
        error = None
        done = 0
        run = None
        try:
            run = manage(shared_misad, model, optimizer, budget=budget, step=step)
            for done in range(3):
                train(model, optimizer, range(done, done + 1))
            run.flush()
            assert digest(model, optimizer) == expected
        except RuntimeError as caught:
            error = str(caught)
        peak = misa.memory.peak_bytes()
        if run is not None:
            assert peak <= budget
            run.release()
        if error is None:
            break
        assert not misa.current_run()
        smallest = int(re.search(r"smallest budget that works here is (?:above )?(\d+) bytes", error).group(1))
        assert "Nothing was lost" in error or run is None and "Nothing was changed" in error
        assert smallest > budget
        refusals.append(smallest)
        budget = smallest + 1024
        del model, optimizer, run
        # What an interrupted backward left in autograd's queue goes with the next backward.
        torch.ones(1, requires_grad=True).sum().backward()
        gc.collect()
    else:
        pytest.fail(f"never enough: {refusals}")
    assert refusals
    # Not much above what one module's step takes (weights, gradient, state twice), and far below all of it.
    assert budget - live < 4 * 128 * 128 * 7


def test_nothing_is_lost_when_an_operator_does_not_fit(shared_misad):
    """After the refusal the state is that of the last whole step, and training goes on with smaller operators."""
    expected = after(4), after(5)
    gc.collect()
    model, optimizer = mlp()
    base = misa.memory.live_bytes() - 4 * sum(p.numel() for p in model.parameters())
    budget = base + (700 << 10)
    run = manage(shared_misad, model, optimizer, budget=budget)
    train(model, optimizer, range(2))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="too small.*smallest budget that works here is") as caught:
            model(torch.ones(4096, 128))
        del caught
        gc.collect()
    train(model, optimizer, range(2, 4))
    assert digest(model, optimizer) == expected[0]
    assert misa.memory.peak_bytes() <= budget
    run.release()
    train(model, optimizer, range(4, 5))
    assert digest(model, optimizer) == expected[1]


@pytest.mark.parametrize("budget", ["", "a lot", "12", "-1MiB", "5 parsecs", 0, -5, "0"])
def test_budgets_that_say_nothing(shared_misad, budget):
    model, optimizer = mlp()
    with pytest.raises((ValueError, RuntimeError)) as caught:
        manage(shared_misad, model, optimizer, budget=budget)
    assert a_sentence(str(caught.value)), str(caught.value)
    assert misa.current_run() is None
    train(model, optimizer, range(2))
    assert digest(model, optimizer) == after(2)


def test_a_model_that_does_not_fit_stays_managed_until_nobody_holds_it(shared_misad, capfd):
    expected = after(3), after(2)
    gc.collect()
    model, optimizer = mlp()
    base = misa.memory.live_bytes() - 4 * sum(p.numel() for p in model.parameters())
    with manage(shared_misad, model, optimizer, budget=base + (700 << 10)) as run:
        train(model, optimizer, range(2))
    assert "stay managed" in capfd.readouterr().err
    train(model, optimizer, range(2, 3))  # with the optimizer's own step
    assert digest(model, optimizer) == expected[0]
    del model, optimizer, run
    gc.collect()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    train(model, optimizer, range(2))
    run.release()
    assert digest(model, optimizer) == after(2)


# --------------------------------------------------------------------------------------------------- misad refuses


@pytest.mark.parametrize(("limits", "words"), [
    ({"capacity": 8 * MIB}, ("pool", "64MiB")),
    ({"disk_capacity": 1 * MIB}, ("disk",)),
])
def test_a_full_pool_or_disk_refuses_and_changes_nothing(folder, limits, words):
    with Misad(folder, **limits) as misad:
        model, optimizer = mlp()
        before = [p.data_ptr() for p in model.parameters()]
        with pytest.raises(RuntimeError) as caught:
            manage(misad, model, optimizer)
        text = str(caught.value)
        assert all(word in text for word in words), text
        assert misa.current_run() is None
        assert [p.data_ptr() for p in model.parameters()] == before
        train(model, optimizer, range(2))
        assert digest(model, optimizer) == after(2)
        # What fits is served afterwards, by the same misad.
        if "capacity" in limits:
            run = manage(misad, model, optimizer, budget=8 * MIB)
            train(model, optimizer, range(2, 4))
            run.release()
            assert digest(model, optimizer) == after(4)
        assert misad.pool()["leased"] == 0


def test_a_draining_misad_refuses(misad):
    import signal
    import time

    first, first_optimizer = mlp()
    run = manage(misad, first, first_optimizer)
    misad.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    program = f"""
import torch, misa
model = torch.nn.Linear(8, 8)
try:
    misa.manage(model, torch.optim.SGD(model.parameters()), budget="1MiB", runtime_dir={str(misad.runtime_dir)!r}, daemon="required")
except RuntimeError as error:
    print("refused", error, flush=True)
"""
    with TrainerProcess(misad.folder, program=program) as other:
        text = other.line("refused")
        other.end()
    assert "misad" in text
    train(first, first_optimizer, range(3))
    run.release()
    assert digest(first, first_optimizer) == after(3)


def test_no_daemon_where_one_is_required(folder):
    model, optimizer = mlp()
    with pytest.raises(RuntimeError, match="A daemon is required here"):
        misa.manage(model, optimizer, budget="64MiB", runtime_dir=str(folder), daemon="required")
    # Freed memory goes back at once, as before: only a managed run keeps it for the next tensors.
    live = misa.memory.live_bytes()
    torch.ones(1 << 20)
    assert misa.memory.live_bytes() == live
    train(model, optimizer, range(1))
    assert digest(model, optimizer) == after(1)


def test_without_a_daemon_a_private_one_is_started_and_said(folder, capfd):
    (folder / "disk").mkdir()
    model, optimizer = mlp()
    with misa.manage(model, optimizer, budget="64MiB", runtime_dir=str(folder), disk=str(folder / "disk")) as run:
        assert run.session()["private_daemon"]
        runtime = Path(run.session()["runtime_directory"])
        train(model, optimizer, range(2))
    assert "a private one was started" in capfd.readouterr().err
    assert digest(model, optimizer) == after(2)
    assert not runtime.exists()


def test_a_binary_that_is_no_misad(folder, monkeypatch):
    model, optimizer = mlp()
    for binary, words in (("/bin/true", "did not become ready"), (str(folder / "nothing"), "could not be started")):
        monkeypatch.setenv("MISA_DAEMON", binary)
        with pytest.raises(RuntimeError, match=words):
            misa.manage(model, optimizer, budget="64MiB", runtime_dir=str(folder))
    train(model, optimizer, range(1))
    assert digest(model, optimizer) == after(1)


@pytest.mark.parametrize("greeting", [
    {"type": "hello", "protocol": 99, "client_version": "9", "start_time": 1},
    {"type": "hello", "client_version": "9"},
    {"type": "something"},
])
def test_misad_refuses_another_protocol(shared_misad, greeting):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(10)
        connection.connect(str(shared_misad.runtime_dir / "lease.sock"))
        connection.send(json.dumps(greeting).encode())
        answer = json.loads(connection.recv(4096))
        assert answer["type"] == "refused"
        assert a_sentence(answer["error"]), answer
        if greeting.get("protocol") == 99:
            assert "99" in answer["error"] and "1" in answer["error"]
        assert connection.recv(4096) == b""


def test_a_misad_of_another_protocol_is_reported(folder):
    """The other way round: a trainer that is refused."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / "lease.sock"))
    listener.listen()
    import threading

    def refuse() -> None:
        connection, _ = listener.accept()
        connection.recv(4096)
        connection.send(json.dumps({"type": "refused", "protocol": 2, "error": "This misad speaks protocol 2."}).encode())
        connection.close()

    thread = threading.Thread(target=refuse)
    thread.start()
    model, optimizer = mlp()
    # Not even with "auto" is a private one started beside a daemon that is there and refuses.
    with pytest.raises(RuntimeError, match="misad refuses: This misad speaks protocol 2"):
        misa.manage(model, optimizer, budget="64MiB", runtime_dir=str(folder))
    thread.join()
    listener.close()


# ------------------------------------------------------------------------------------------------------ optimizers


class Unknown(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                    p.sub_(self.state[p]["mean"], alpha=group["lr"])


class Separable(Unknown):
    misa_separable = True


@pytest.mark.parametrize("make", [Unknown, torch.optim.LBFGS], ids=["unknown", "lbfgs"])
def test_optimizers_that_cannot_be_taken_apart_are_refused(shared_misad, make):
    model, _ = mlp()
    with pytest.raises(ValueError, match="misa_separable"):
        manage(shared_misad, model, make(model.parameters()))
    assert misa.current_run() is None


@pytest.mark.parametrize("stress", [False, True])
def test_an_optimizer_that_says_it_is_separable(shared_misad, capfd, stress):
    def make() -> Any:
        torch.manual_seed(7)
        model = Mlp()
        return model, Separable(model.parameters())

    plain_model, plain_optimizer = make()
    train(plain_model, plain_optimizer, range(3))
    model, optimizer = make()
    run = manage(shared_misad, model, optimizer, stress=stress)
    train(model, optimizer, range(3))
    assert digest(model, optimizer) == digest(plain_model, plain_optimizer)
    assert run.report()["step_mode"] == "eager"
    assert run.report()["optimizer_bytes"] >= 4 * 128 * 128 * 6
    assert "Separable is not one of the optimizers known" in capfd.readouterr().err
    run.release()


def test_a_step_that_another_thread_does_not_end_is_a_sentence(shared_misad, capfd):
    """Who needs what it steps waits for so long as for the disk, and has it afterwards all the same."""
    inside, go_on = threading.Event(), threading.Event()

    class Stuck(Separable):
        def step(self, closure: Any = None) -> None:
            inside.set()
            assert go_on.wait(60)
            super().step(closure)

    torch.manual_seed(7)
    model = Mlp(layers=1)
    optimizer = Stuck(model.parameters())
    run = manage(shared_misad, model, optimizer, wait_seconds=0.2)
    loss_of(model, 0).backward()
    stepper = threading.Thread(target=optimizer.step)
    stepper.start()
    assert inside.wait(60)
    with pytest.raises(RuntimeError, match="Another thread has been at the optimizer's step of "):
        for parameter in model.parameters():
            parameter.sum()
    go_on.set()
    stepper.join(60)
    assert not stepper.is_alive()
    torch.manual_seed(7)
    plain = Mlp(layers=1)
    loss_of(plain, 0).backward()
    other = Separable(plain.parameters())
    other.step()
    assert [p.tolist() for p in model.parameters()] == [p.tolist() for p in plain.parameters()]
    run.release()


def test_wrong_options_are_sentences(shared_misad):
    model, optimizer = mlp()
    for wrong in ({"mode": "fast"}, {"step": "soon"}, {"daemon": "perhaps"}):
        with pytest.raises(ValueError, match="must be one of"):
            manage(shared_misad, model, optimizer, **wrong)
    with pytest.raises(ValueError, match="none of the models"):
        manage(shared_misad, nn.Linear(4, 4), optimizer)
    with pytest.raises(ValueError, match="at least one model"):
        manage(shared_misad, [], optimizer)
    assert misa.current_run() is None


def test_a_second_manage_is_refused(shared_misad):
    model, optimizer = mlp()
    other, other_optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    with pytest.raises(ValueError, match="already manages"):
        manage(shared_misad, other, other_optimizer)
    with pytest.raises(ValueError, match="already manages"):
        manage(shared_misad, model, optimizer)
    train(model, optimizer, range(2))
    run.release()
    assert digest(model, optimizer) == after(2)
    assert "step" not in optimizer.__dict__ and "zero_grad" not in optimizer.__dict__


def test_clipping_and_scaling_are_torchs_own_again_afterwards(shared_misad):
    inside = torch.nn.utils.clip_grad

    def functions() -> tuple[Any, ...]:
        return (inside._group_tensors_by_device_and_dtype, inside._get_total_norm,
                torch._amp_foreach_non_finite_check_and_unscale_, torch.amp.GradScaler._unscale_grads_)

    before = functions()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer)
    assert all(now is not then for now, then in zip(functions(), before))
    run.release()
    assert functions() == before


# ----------------------------------------------------------------------------------------- what in_backward forbids


def test_clipping_after_steps_in_backward_is_refused(shared_misad):
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer, step="in_backward")
    for clip in (lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
                 lambda: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)):
        optimizer.zero_grad()
        loss_of(model, 0).backward()
        with pytest.raises(RuntimeError, match="too late to clip"):
            clip()
        optimizer.step()
    run.release()


def test_unscaling_after_steps_in_backward_is_refused(shared_misad):
    model, optimizer = mlp()
    scaler = torch.amp.GradScaler("cpu")
    run = manage(shared_misad, model, optimizer, step="in_backward")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 0)).backward()
    with pytest.raises(RuntimeError, match="too late to unscale"):
        scaler.step(optimizer)
    run.release()


def test_accumulation_with_steps_in_backward_is_refused(shared_misad):
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer, step="in_backward")
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        loss_of(model, 3).backward()
    run.release()


def test_partial_accumulation_with_steps_in_backward_is_refused(shared_misad):
    """Not even a module's worth of second gradients: seen at step()."""
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    run = manage(shared_misad, model, optimizer, step="in_backward")
    loss_of(model, 0).backward()
    model.norm.weight.sum().backward()
    with pytest.raises(RuntimeError, match="second gradient"):
        optimizer.step()
    run.release()


# ---------------------------------------------------------------------------------- tensors under somebody's hands


@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize("step", ["deferred", "eager", "in_backward"])
@pytest.mark.parametrize("how", ["replaced", "replaced after a look", "set", "resized"])
def test_replaced_and_resized_tensors_are_trained_on(shared_misad, capfd, how, step, stress):
    def loop(managed: Any) -> tuple[Any, Any]:
        model, optimizer = mlp()
        with managed(model, optimizer):
            train(model, optimizer, range(2))
            weight = model.blocks[2].weight
            fresh = torch.randn(128, 128, generator=torch.Generator().manual_seed(5)) / 8
            if how == "replaced":
                weight.data = fresh  # no operator has looked at the weight since step()
            elif how == "replaced after a look":
                weight.data = weight.data * 0.5 + fresh
            elif how == "set":
                with torch.no_grad():
                    weight.set_(fresh)
            else:
                weight.data.resize_(300, 128)
            train(model, optimizer, range(2, 5))
            result = digest(model, optimizer)
        return model, result

    model, expected = loop(lambda *_: contextlib.nullcontext())
    runs = []

    def managed(model: Any, optimizer: Any) -> Any:
        runs.append(manage(shared_misad, model, optimizer, step=step, stress=stress))
        return runs[-1]

    model, result = loop(managed)
    assert result == expected
    assert "Parameter blocks.2.weight was resized or replaced" in capfd.readouterr().err
    assert len(runs[0].report()["notices"]) == 1
    runs[0].release()


def test_a_replacement_of_another_shape(shared_misad):
    def loop(managed: Any) -> str:
        import contextlib

        torch.manual_seed(7)
        model = Mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with managed(model, optimizer) if managed else contextlib.nullcontext():
            train(model, optimizer, range(2))
            with torch.no_grad():
                model.head.weight.data = model.head.weight.data[:, :64].clone()
                model.blocks[5].weight.data = model.blocks[5].weight.data[:64].clone()
                model.blocks[5].bias.data = model.blocks[5].bias.data[:64].clone()
            optimizer.zero_grad()
            train(model, optimizer, range(2, 4))
            return digest(model, optimizer)

    expected = loop(None)
    assert loop(lambda m, o: manage(shared_misad, m, o)) == expected


# ------------------------------------------------------------------------------------------------------- raw data


@pytest.mark.parametrize("fits", [True, False])
def test_saving_gives_the_very_bytes(shared_misad, folder, fits):
    """A deferred step is due and half of it is away."""
    gc.collect()
    plain_model, plain_optimizer = mlp()
    train(plain_model, plain_optimizer, range(1))
    gc.collect()
    before = misa.memory.live_bytes()
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer, budget=before + ((4 << 20) if fits else (500 << 10)))
    train(model, optimizer, range(1))
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
    assert misa.memory.peak_bytes() <= run.budget_bytes
    run.release()
    saved = torch.load(folder / "saved.pt")
    assert all(torch.equal(saved["model"][k], v) for k, v in plain_model.state_dict().items())
    for i, state in plain_optimizer.state_dict()["state"].items():
        assert all(torch.equal(saved["optimizer"]["state"][i][k], v) for k, v in state.items())
    assert digest(model, optimizer) == digest(plain_model, plain_optimizer)


def test_resident_beyond_the_budget_is_a_sentence(shared_misad):
    gc.collect()
    model, optimizer = mlp(layers=10)
    base = misa.memory.live_bytes() - 4 * sum(p.numel() for p in model.parameters())
    run = manage(shared_misad, model, optimizer, budget=base + (430 << 10))
    with pytest.raises(RuntimeError, match="too small"):
        with misa.resident(*model.parameters()):
            pass
    train(model, optimizer, range(1))
    run.flush()  # else both steps would have to fit as well
    with misa.resident(model.blocks[0].weight, model.blocks[1].weight):
        pass
    run.release()


# -------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("step", ["deferred", "eager"])
def test_a_step_that_fails_is_an_error_once(shared_misad, step):
    class Failing(Separable):
        fail = True

        def step(self, closure: Any = None) -> None:
            super().step()
            if Failing.fail:
                Failing.fail = False
                raise ArithmeticError("half-way")

    torch.manual_seed(7)
    model = Mlp()
    optimizer = Failing(model.parameters())
    run = manage(shared_misad, model, optimizer, step=step)
    optimizer.zero_grad()
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match="half-way"):
        optimizer.step()
        run.flush()
    run.flush()
    # No module has stepped twice: its state is that of one step, or of none.
    for parameter in model.parameters():
        if "mean" in optimizer.state.get(parameter, {}) and parameter.grad is not None:
            assert torch.equal(optimizer.state[parameter]["mean"], parameter.grad * 0.5)
    run.release()


def test_resuming_under_a_tight_budget(shared_misad):
    """Model and optimizer state were there before, and are larger than the budget together."""
    expected = after(4)
    gc.collect()
    base = misa.memory.live_bytes()
    model, optimizer = mlp()
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    gc.collect()
    budget = base + (700 << 10)
    assert misa.memory.live_bytes() > budget
    run = manage(shared_misad, model, optimizer, budget=budget)
    train(model, optimizer, range(2, 4))
    assert digest(model, optimizer) == expected
    assert misa.memory.peak_bytes() <= budget
    run.release()
