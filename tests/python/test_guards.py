"""Guards in real trainings: managed as the plain reference, and what the daemon makes of reported losses, pins and batches."""

from __future__ import annotations

import json
import math
import subprocess
from typing import Any

import misa
import pytest
import torch

from tests.python.beside import assert_identical, plain
from tests.python.models import Transformer, loss_of
from tests.python.processes import ROOT, Misad, wait_for

WAITING = {"wait_for_stable_loss": True, "stable_window": 4, "stable_tolerance": 0.5, "stable_hold": 2}
BLOCK = [f"blocks.{i}" for i in range(3)]


def sampled_loop(steps: int, micro_batches: int = 1, **options: Any) -> Any:
    def loop(manage: Any) -> tuple[Any, Any, list[Any]]:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        seen: list[Any] = []
        run = manage(model, optimizer)
        if run.__class__.__name__ == "nullcontext":
            run = misa.SampledReference(model, optimizer, **options)
        with run as managed:
            managed = managed or run
            for step in range(steps):
                optimizer.zero_grad()
                for micro in range(micro_batches):
                    loss = loss_of(model, step * micro_batches + micro) / micro_batches
                    loss.backward()
                    managed.step_loss(loss * micro_batches, rows=4)
                optimizer.step()
                seen.append((loss.item(), [p.requires_grad for p in model.parameters()]))
        assert all(p.requires_grad for p in model.parameters())
        return model, optimizer, seen

    return loop


def trained(seen: list[Any]) -> list[int]:
    return [sum(flags) for _, flags in seen]


def test_sampling_waits_for_a_stable_loss_in_the_very_step_of_the_reference(shared_misad):
    options = {"delta": 0.3, "inner_steps": 2, "seed": 3, **WAITING}
    loop = sampled_loop(9, **options)
    for pressure, step in (("tight", "deferred"), ("stress", "in_backward")):
        result = assert_identical(loop, shared_misad, pressure, share=0.7, step=step, mode="sampled",
                                  sampled=misa.Sampled(**options))
        counts = trained(result.seen)
        everything = len(list(Transformer().parameters()))
        # Four losses fill the window, and two judgements in a row have to agree.
        assert counts[:4] == [everything] * 4
        assert everything not in counts[4:]
    assert "sampler_" not in shared_misad.events()


def test_a_loss_that_is_not_told_is_waited_for_and_said_once(capfd):
    loop = sampled_loop(8, delta=0.3, wait_for_stable_loss=True, stable_window=4)
    assert set(trained(plain(loop).seen)) == {len(list(Transformer().parameters()))}
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with misa.SampledReference(model, optimizer, delta=0.3, wait_for_stable_loss=True, stable_window=4):
        for step in range(6):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    assert capfd.readouterr().err.count("none of 4 steps told one") == 1


def test_micro_batches_count_as_steps_of_the_round(shared_misad):
    options = {"delta": 0.3, "inner_steps": 4, "seed": 3, "eta": 0.0}
    dense = {**options, "count_micro_batches": True}

    def rounds(seen: list[Any]) -> int:
        flags = [flags for _, flags in seen]
        return sum(a != b for a, b in zip(flags, flags[1:]))

    sparse = rounds(plain(sampled_loop(8, 2, **options)).seen)
    result = assert_identical(sampled_loop(8, 2, **dense), shared_misad, "tight", share=0.7, mode="sampled",
                              sampled=misa.Sampled(**dense))
    assert (sparse, rounds(result.seen)) == (2, 4)
    assert "sampler_" not in shared_misad.events()


def test_a_resume_goes_on_waiting_where_it_was():
    def run(steps: list[int], state: dict[str, Any] | None = None) -> tuple[str, dict[str, Any], Any]:
        torch.manual_seed(7)
        model = Transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        if state is not None:
            model.load_state_dict(state["model"])
        with misa.SampledReference(model, optimizer, delta=0.3, inner_steps=2, **WAITING) as reference:
            if state is not None:
                reference.load_state_dict(state["sampler"])
            for step in steps:
                torch.manual_seed(step)
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                reference.step_loss(loss)
                optimizer.step()
            saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "sampler": reference.state_dict()}
        return misa.state_sha256(model, optimizer), saved, reference

    straight, _, _ = run(list(range(9)))
    for cut in (2, 7):  # while it waits, and after
        _, saved, _ = run(list(range(cut)))
        assert run(list(range(cut, 9)), saved)[0] == straight
    _, saved, _ = run([0, 1])
    model = Transformer()
    other = misa.SampledReference(model, torch.optim.SGD(model.parameters(), lr=0.1), delta=0.3, inner_steps=2)
    with pytest.raises(ValueError, match="wait_for_stable_loss=True.*Nothing was changed"):
        other.load_state_dict(saved["sampler"])


def test_dependencies_are_drawn_together_and_impossible_ones_refused(shared_misad):
    options = {
        "delta": 0.5, "inner_steps": 1, "seed": 5, "eta": 0.0,
        "needs": tuple(pair for b in BLOCK for pair in ((f"{b}.query", f"{b}.key"), (f"{b}.key", f"{b}.query"))),
        "apart": ((f"{BLOCK[0]}.up", f"{BLOCK[1]}.up"),),
    }
    loop = sampled_loop(8, **options)
    result = assert_identical(loop, shared_misad, "tight", share=0.7, mode="sampled", sampled=misa.Sampled(**options))
    names = [name for name, _ in Transformer().named_parameters()]
    drawn = [{n.removesuffix(".weight") for n, on in zip(names, flags) if on} for _, flags in result.seen]
    for modules in drawn:
        for block in BLOCK:
            assert (f"{block}.query" in modules) == (f"{block}.key" in modules)
        assert not {f"{BLOCK[0]}.up", f"{BLOCK[1]}.up"} <= modules
    assert "sampler_" not in shared_misad.events()
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    for wrong, sentence in (
        ({"needs": (("blocks.0.query", "blocks.9.key"),)}, "there is none of this name"),
        ({"needs": (("blocks.0.query", "blocks.0.key"),), "apart": (("blocks.0.key", "blocks.0.query"),)}, "contradict"),
    ):
        with pytest.raises(ValueError, match=sentence):
            misa.manage(model, optimizer, budget="64MiB", mode="sampled", sampled=misa.Sampled(delta=0.5, **wrong),
                        runtime_dir=str(shared_misad.runtime_dir))
        assert misa.current_run() is None
        assert all(p.requires_grad for p in model.parameters())


def sessions(misad: Any) -> list[dict[str, Any]]:
    out = subprocess.run([ROOT / "build/bin/misactl", "--runtime-dir", misad.runtime_dir, "--json", "sessions"],
                         check=True, capture_output=True, text=True, timeout=30)
    return json.loads(out.stdout)["sessions"]


def test_the_daemon_hears_of_losses_pins_and_rows(misad):
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    expected = plain(exact_loop)
    budget = misa.memory.live_bytes() + int(0.7 * expected.bytes)
    del model, optimizer
    kept: dict[str, Any] = {}

    def look(run: misa.Run, step: int) -> None:
        run.step_loss(math.nan if step == 1 else 3.0, rows=4)
        if step == 7:
            wait_for(lambda: sessions(misad)[0]["guards"]["kept_modules"] > 0, 30, "modules keep their place")
            kept["guards"] = sessions(misad)[0]["guards"]
            kept["report"] = run.report()["batch"]

    model, optimizer, _ = exact_loop(lambda m, o: misa.manage(m, o, budget=budget, pin=["embedding", "blocks.1.up"],
                                                               runtime_dir=str(misad.runtime_dir), daemon="required"), look)
    assert misa.state_sha256(model, optimizer) == expected.sha256
    guards = kept["guards"]
    assert guards["kept_modules"] in (1, 2)
    assert guards["loss"] == 3.0 and not guards["loss_stable"]
    assert guards["rows"] == 4 and guards["most_rows"] >= 4
    assert kept["report"]["rows"] == 4
    assert 0 <= kept["report"]["free_rows"] <= kept["report"]["most_rows"]
    assert kept["report"]["hint"]
    events = [json.loads(line) for line in misad.events().splitlines()]
    refused = [event for event in events if event["kind"] == "loss_refused"]
    assert len(refused) == 1 and "not a finite number" in refused[0]["cause"]


def exact_loop(manage: Any, look: Any = None) -> tuple[Any, Any, list[Any]]:
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with manage(model, optimizer) as run:
        for step in range(8):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            if look is not None:
                look(run, step)
            optimizer.step()
    if run is not None:
        run.release()
    return model, optimizer, []


def test_pins_that_nothing_goes_by_are_refused(shared_misad):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    for pin, sentence in ((["embeddings"], "neither a module's name nor a kind; the kinds here are .*embedding"),
                          ("embedding", "must be a list")):
        with pytest.raises(ValueError, match=sentence):
            misa.manage(model, optimizer, budget="64MiB", pin=pin, runtime_dir=str(shared_misad.runtime_dir))
        assert misa.current_run() is None


def test_hot_modules_that_keep_their_place_change_no_bit(folder):
    expected = plain(exact_loop)
    budget = misa.memory.live_bytes() + int(0.6 * expected.bytes)
    extra = "policy: {residency: importance}\nguards: {wait_for_stable_loss: false}\n"
    kept: list[int] = []
    with Misad(folder, extra=extra) as daemon:

        def look(run: misa.Run, step: int) -> None:
            if step == 6:
                wait_for(lambda: sessions(daemon)[0]["guards"]["importance_in_force"], 30, "importance is in force")
                kept.append(sessions(daemon)[0]["guards"]["kept_bytes"])

        model, optimizer, _ = exact_loop(lambda m, o: misa.manage(m, o, budget=budget, runtime_dir=str(daemon.runtime_dir),
                                                                   daemon="required"), look)
    assert misa.state_sha256(model, optimizer) == expected.sha256
    assert kept[0] > 0
