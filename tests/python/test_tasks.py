"""Tasks that take turns in one trainer: the bits of plain training, an importance of their own, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import misa
import pytest
import torch
from torch import nn

from tests.python.beside import PRESSURES, assert_identical
from tests.python.models import Mlp
from tests.python.small_training import manage, mlp, train

MISACTL = Path(__file__).resolve().parents[2] / "build/bin/misactl"
TASKS = {"letters": 3.0, "digits": 1.0}
SAMPLED = {"delta": 0.4, "eta": 50.0, "alpha": 0.5, "inner_steps": 3, "seed": 3}


class TwoHeads(Mlp):
    """One trunk, and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(128, 16) for name in TASKS})
        del self.head

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.heads[task](x)


def two_heads() -> tuple[TwoHeads, torch.optim.AdamW]:
    torch.manual_seed(7)
    model = TwoHeads()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def task_step(model: TwoHeads, optimizer: Any, task: str, number: int) -> float:
    draw = torch.Generator().manual_seed(number)
    inputs, targets = torch.randn(4, 128, generator=draw), torch.randint(16, (4,), generator=draw)
    optimizer.zero_grad()
    # Gradients of other sizes, and with them another importance.
    loss = nn.functional.cross_entropy(model(inputs, task), targets) * (1 if task == "letters" else 5)
    loss.backward()
    optimizer.step()
    return loss.item()


def alternate(model: TwoHeads, optimizer: Any, steps: range, weights: dict[str, float] | None = TASKS) -> list[float]:
    """`weights` None: nothing is named."""
    losses = []
    for number in steps:
        name = list(TASKS)[number % 2]
        if weights is None:
            losses.append(task_step(model, optimizer, name, number))
        else:
            with misa.task(name, weight=weights[name]):
                losses.append(task_step(model, optimizer, name, number))
    return losses


def loop(weights: dict[str, float] | None, sampled: dict[str, Any] | None = None) -> Any:
    def run(manage: Any) -> tuple[Any, Any, list[Any]]:
        model, optimizer = two_heads()
        managing = manage(model, optimizer)
        if sampled is not None and managing.__class__.__name__ == "nullcontext":
            managing = misa.SampledReference(model, optimizer, **sampled)
        seen: list[Any] = []
        with managing:
            for number in range(9):
                seen.extend(alternate(model, optimizer, range(number, number + 1), weights))
                seen.append([p.requires_grad for p in model.parameters()])
        return model, optimizer, seen

    return run


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("step", ["deferred", "eager", "in_backward"])
def test_alternating_tasks_train_the_bits_of_plain_training(shared_misad, step, pressure):
    # Plain training that names nothing.
    result = assert_identical(loop(TASKS), shared_misad, pressure, key="tasks-exact", step=step)
    assert [(t["name"], t["weight"], t["steps"]) for t in result.report["tasks"]] == [("letters", 3, 5), ("digits", 1, 4)]
    assert [t["share"] for t in result.report["tasks"]] == [0.75, 0.25]


def test_naming_tasks_changes_no_bit_of_exact_training(shared_misad):
    named = assert_identical(loop(TASKS), shared_misad, "tight", key="tasks-exact")
    unnamed = assert_identical(loop(None), shared_misad, "tight", key="tasks-exact")
    assert named.sha256 == unnamed.sha256 and unnamed.report["tasks"] == []


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("weights", [TASKS, {"letters": 0.01, "digits": 7.0}, None], ids=["3-1", "0.01-7", "none"])
def test_sampled_draws_by_task_are_those_of_the_reference(misad, weights, pressure):
    assert_identical(loop(weights, SAMPLED), misad, pressure, key=("tasks", str(weights)), share=0.8, mode="sampled",
                     sampled=misa.Sampled(**SAMPLED))
    assert "sampler_mismatch" not in misad.events()


def test_the_samplers_state_has_the_tasks_and_without_any_is_what_it_was():
    def reference(weights: dict[str, float] | None) -> misa.SampledReference:
        model, optimizer = two_heads()
        with misa.SampledReference(model, optimizer, **SAMPLED) as line:
            alternate(model, optimizer, range(4), weights)
        return line

    with_tasks, without = reference(TASKS), reference(None)
    assert with_tasks._driver.tasks() == [("", 1, 0), ("letters", 3, 2), ("digits", 1, 2)]
    # Magic number, eleven words, the active set, four words a module, checksum.
    words = 12 + len(without.active_modules) + 4 * 6 + 1
    assert len(without.state_dict()["sampler"]) == 8 * words < len(with_tasks.state_dict()["sampler"])
    model, optimizer = two_heads()
    again = misa.SampledReference(model, optimizer, **SAMPLED)
    again.load_state_dict(with_tasks.state_dict())
    assert again._driver.digest == with_tasks._driver.digest != without._driver.digest


@pytest.mark.parametrize("mode", ["exact", "sampled"])
def test_a_resumed_run_knows_its_tasks(shared_misad, mode):
    options: dict[str, Any] = {"mode": mode}
    if mode == "sampled":
        options["sampled"] = misa.Sampled(**SAMPLED)

    def whole() -> Any:
        model, optimizer = two_heads()
        with manage(shared_misad, model, optimizer, **options) as run:
            alternate(model, optimizer, range(11))
            return misa.state_sha256(model, optimizer), run.report()["tasks"]

    model, optimizer = two_heads()
    with manage(shared_misad, model, optimizer, **options) as run:
        alternate(model, optimizer, range(4))  # in the middle of a round
        saved = {"run": run.state_dict(), "model": {k: v.clone() for k, v in model.state_dict().items()},
                 "optimizer": {k: v for k, v in optimizer.state_dict().items()}}
        optimizer_state = torch.utils._pytree.tree_map(lambda v: v.clone() if isinstance(v, torch.Tensor) else v, saved["optimizer"])
    model, optimizer = two_heads()
    with manage(shared_misad, model, optimizer, **options) as run:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(optimizer_state)
        run.load_state_dict(saved["run"])
        alternate(model, optimizer, range(4, 11))
        resumed = misa.state_sha256(model, optimizer), run.report()["tasks"]
        for damaged in ([("letters", 1.0, 2)], [("", 1.0, 0), ("a", float("nan"), 1)], [("", 1.0, -1)], 7, [("", 1.0, 0)] * 2):
            with pytest.raises(ValueError, match="saved tasks are damaged"):
                run.load_state_dict({**saved["run"], "tasks": damaged})
    assert resumed == whole()


def test_misactl_shows_them(misad):
    model, optimizer = two_heads()
    with manage(misad, model, optimizer):
        alternate(model, optimizer, range(6))
        task_step(model, optimizer, "letters", 6)  # of no task
        task_step(model, optimizer, "letters", 7)  # a step is told of when the next one begins
        for _ in range(100):  # the report is on its way
            said = subprocess.run([MISACTL, "--runtime-dir", str(misad.runtime_dir), "sessions", "--json"],
                                  capture_output=True, text=True, timeout=30)
            (session,) = json.loads(said.stdout)["sessions"]
            if int(session["step"]) >= 7:
                break
        assert misad.metrics()['misa_session_tasks{session="0"}'] == 2
    tasks = {task["name"]: task for task in session["tasks"]}
    assert set(tasks) == {"", "letters", "digits"}
    assert tasks["letters"]["weight"] == 3 and int(tasks["letters"]["steps"]) == 3
    assert tasks["letters"]["share"] == pytest.approx(3 / 5) and tasks[""]["share"] == pytest.approx(1 / 5)


@pytest.mark.parametrize(("name", "weight", "words"), [
    ("a", float("nan"), "must be a number above 0"), ("a", 0, "must be a number above 0"), ("a", -2.0, "must be a number above 0"),
    ("a", float("inf"), "must be a number above 0"), ("a", 1001, "at most 1000"), ("a", "2", "must be a number"),
    ("a", True, "must be a number"), ("", 1, "needs a name"), (7, 1, "is text"), ("x" * 65, 1, "at most 64 bytes"),
    ("a\nb", 1, "control characters"),
])
@pytest.mark.parametrize("managed", [True, False], ids=["managed", "plain"])
def test_what_is_no_task_is_refused(shared_misad, managed, name, weight, words):
    model, optimizer = mlp()
    run = manage(shared_misad, model, optimizer) if managed else None
    train(model, optimizer, range(1))
    with pytest.raises(ValueError, match=re.escape(words) + ".*Nothing was changed"):
        with misa.task(name, weight=weight):
            pytest.fail("it was entered")
    with misa.task("good", weight=2):
        train(model, optimizer, range(1, 2))
    if run is not None:
        assert [t["name"] for t in run.report()["tasks"]] == ["", "good"]
        run.release()


def test_a_task_inside_another_and_one_too_many(shared_misad):
    model, optimizer = mlp()
    with manage(shared_misad, model, optimizer) as run:
        with pytest.raises(ValueError, match="'inner' would begin inside task 'outer'"):
            with misa.task("outer"):
                with misa.task("inner"):
                    pytest.fail("it was entered")
        for number in range(15):
            with misa.task(f"t{number}"):
                pass
        with pytest.raises(ValueError, match="at most 16 tasks"):
            with misa.task("late"):
                pytest.fail("it was entered")
        with misa.task("outer"):
            train(model, optimizer, range(1))
        assert {t["name"]: t["steps"] for t in run.report()["tasks"]}["outer"] == 1


def test_an_exception_leaves_the_task(shared_misad):
    model, optimizer = mlp()
    with manage(shared_misad, model, optimizer) as run:
        with pytest.raises(KeyError):
            with misa.task("broken", weight=2):
                raise KeyError("of the loop")
        with misa.task("next"):
            train(model, optimizer, range(1))
        with misa.task("broken"):
            train(model, optimizer, range(1, 2))
        assert {t["name"]: t["weight"] for t in run.report()["tasks"]} == {"broken": 2, "next": 1}


def test_declared_tasks_are_the_only_ones(shared_misad):
    model, optimizer = mlp()
    for wrong, words in (({}, "names no task"), ({"a": 0}, "above 0"), ({f"t{i}": 1 for i in range(17)}, "at most 16")):
        with pytest.raises(ValueError, match=words):
            manage(shared_misad, model, optimizer, tasks=wrong)
        assert misa.current_run() is None
    with manage(shared_misad, model, optimizer, tasks={"letters": 2, "digits": 1}) as run:
        with pytest.raises(ValueError, match="no task \"leters\"; this training has \"letters\", \"digits\""):
            with misa.task("leters"):
                pytest.fail("it was entered")
        with misa.task("letters"):
            train(model, optimizer, range(1))
        assert run.report()["tasks"][0] == {"name": "letters", "weight": 2, "share": 1, "steps": 1}
        state = run.state_dict()
        with pytest.raises(ValueError, match="has the task 'others'"):
            run.load_state_dict({**state, "tasks": [("", 1.0, 0), ("others", 1.0, 1)]})
        run.load_state_dict(state)
