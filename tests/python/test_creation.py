"""Models made directly under a budget: the weights of plain initialisation, however large the model is."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path
from typing import Any

import misa
import pytest
import torch
from torch import nn

from demo.cgroup import CgroupUnavailable, MemoryCgroup
from tests.python.beside import digest
from tests.python.models import MODELS, Mlp, Transformer, loss_of
from tests.python.processes import MIB, Misad, TrainerProcess


class Initialised(nn.Module):
    """Draws again over what the layers have drawn, copies layers, ties weights, and has buffers."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.table = nn.Embedding(300, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("seen", torch.rand(7))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 300, bias=False)
        self.head.weight = self.table.weight
        self.apply(self.draw)
        with torch.no_grad():
            self.layers.layers[1].linear1.weight[3:5] *= 2.0

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.layers(self.table(tokens) * self.scale)
        return self.head(self.norm(h.mean(1)))


def budget_of(room: int) -> int:
    gc.collect()
    return misa.memory.live_bytes() + room


def options(misad: Misad, room: int, **more: Any) -> dict[str, Any]:
    return {"budget": budget_of(room), "runtime_dir": str(misad.runtime_dir), "daemon": "required", **more}


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        if isinstance(model, Initialised):
            tokens = torch.randint(300, (4, 5), generator=torch.Generator().manual_seed(step))
            loss = nn.functional.cross_entropy(model(tokens), tokens[:, 0])
        else:
            loss = loss_of(model, step)
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("stress", [False, True])
@pytest.mark.parametrize("make", [Initialised, *MODELS.values()])
def test_weights_are_those_of_plain_initialisation(shared_misad, make, stress):
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(7)
    plain = make()
    after_plain = torch.rand(3)
    state = {name: t.clone() for name, t in plain.state_dict().items()}
    optimizer = adamw(plain)
    train(plain, optimizer, range(3))
    expected = digest(plain, optimizer)
    del plain, optimizer
    gc.collect()

    torch.manual_seed(7)
    given = options(shared_misad, 12 * MIB, stress=stress)
    with misa.empty_init(**given):
        model = make()
        assert torch.equal(torch.rand(3), after_plain)  # the generator is where it would be
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    optimizer = adamw(model)
    with misa.manage(model, optimizer, **given) as run:
        train(model, optimizer, range(3))
        assert digest(model, optimizer) == expected
        assert misa.memory.peak_bytes() <= given["budget"]
        assert run.report()["notices"] == []
    run.release()
    assert digest(model, optimizer) == expected


class Wide(nn.Module):
    """8 matrices of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def test_a_model_larger_than_its_budget(misad):
    torch.manual_seed(7)
    expected = [p.sum().item() for p in Wide().parameters()]
    torch.manual_seed(7)
    given = options(misad, 14 * MIB)
    with misa.empty_init(**given):
        model = Wide()
        assert misa.memory.peak_bytes() <= given["budget"]
    assert [p.sum().item() for p in model.parameters()] == expected
    before = misad.pool("disk")["leased"]
    with misa.manage(model, torch.optim.SGD(model.parameters(), lr=0.01), **{k: v for k, v in given.items() if k == "budget"}) as run:
        # Matrices stay where they were made.
        assert run.report()["unloads"] <= 8
        assert misad.pool("disk")["leased"] <= before + 40 * MIB
        x = torch.randn(4, 1024)
        for _ in range(2):
            run_loss = model(x).square().mean()
            run_loss.backward()
            run._optimizers[0].step()
            run._optimizers[0].zero_grad()
        run.flush()
        assert misa.memory.peak_bytes() <= given["budget"]
    del model, run_loss
    gc.collect()
    run.release()


def test_cast_to_another_type_inside(shared_misad):
    torch.manual_seed(7)
    expected = Wide().bfloat16().state_dict()
    torch.manual_seed(7)
    given = options(shared_misad, 14 * MIB)
    with misa.empty_init(**given):
        model = Wide().bfloat16()
    assert misa.memory.peak_bytes() <= given["budget"]
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())
    del model
    gc.collect()
    misa.manage(*_small(), **options(shared_misad, 4 * MIB)).release()  # what was made and dropped is in nobody's way


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Mlp(layers=1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_mode_sampled_takes_over(shared_misad):
    sampled = misa.Sampled(delta=0.3, inner_steps=2, seed=3)
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with misa.SampledReference(model, optimizer, delta=0.3, inner_steps=2, seed=3):
        train(model, optimizer, range(5))
    expected = digest(model, optimizer)
    torch.manual_seed(7)
    with misa.empty_init(**options(shared_misad, 16 * MIB, mode="sampled", sampled=sampled)):
        model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with misa.manage(model, optimizer, mode="sampled", sampled=sampled) as run:
        train(model, optimizer, range(5))
        assert digest(model, optimizer) == expected
    run.release()


@pytest.mark.parametrize("range_", [False, True])
def test_a_budget_that_the_daemon_chooses(folder, range_):
    """All of a small device, or no more than was asked for."""
    torch.manual_seed(7)
    plain = Wide()
    expected = [p.sum().item() for p in plain.parameters()]
    x = torch.randn(4, 1024)

    def train_wide(model: nn.Module) -> str:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        with misa.manage(model, optimizer) if model is not plain else contextlib.nullcontext() as run:
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            if run is not None:
                assert run.budget_bytes <= most
                assert misa.memory.peak_bytes() <= most
            sha256 = digest(model, optimizer)
        if run is not None:
            run.release()
        return sha256

    trained = train_wide(plain)
    most = budget_of(26 * MIB)
    with Misad(folder, capacity=budget_of(36 * MIB)) as misad:
        given: dict[str, Any] = {"runtime_dir": str(misad.runtime_dir), "daemon": "required",
                                 "budget": (budget_of(2 * MIB), most) if range_ else "auto"}
        most = most if range_ else budget_of(36 * MIB)
        torch.manual_seed(7)
        with misa.empty_init(**given):
            model = Wide()
        assert [p.sum().item() for p in model.parameters()] == expected
        with pytest.raises(ValueError, match="empty_init was given budget"):
            misa.manage(model, torch.optim.SGD(model.parameters(), lr=0.01), budget="20MiB")
        assert train_wide(model) == trained


def test_a_second_model_made_inside_stays_usable(shared_misad):
    torch.manual_seed(7)
    with misa.empty_init(**options(shared_misad, 16 * MIB)):
        teacher, model = Wide(), Mlp()
    expected = teacher.blocks[7].weight.sum().item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with misa.manage(model, optimizer) as run:
        for _ in range(3):
            train(model, optimizer, range(1))
            with torch.no_grad():
                teacher(torch.ones(1, 1024))
        assert run.unload_all()
        assert teacher.blocks[7].weight.sum().item() == expected
        assert run.report()["notices"] == []
    del teacher
    run.release()


def test_streamed_from_safetensors(shared_misad, folder):
    torch.manual_seed(7)
    source = Wide()
    misa.save(folder / "saved", model=source, shard_bytes=10 * MIB)
    expected = {name: t.sum().item() for name, t in source.state_dict().items()}
    del source
    given = options(shared_misad, 12 * MIB)
    model = misa.from_safetensors(Wide, folder / "saved", **given)
    assert misa.memory.peak_bytes() <= given["budget"]
    assert {name: t.sum().item() for name, t in model.state_dict().items()} == expected
    with pytest.raises(ValueError, match="already manages"):
        with misa.empty_init(**given):
            pass
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for wrong, words in (({"budget": "1GiB"}, "budget"), ({"mode": "sampled"}, "mode")):
        with pytest.raises(ValueError, match=words):
            misa.manage(model, optimizer, **wrong)
    with misa.manage(model, optimizer) as run:
        pass
    run.release()
    assert {name: t.sum().item() for name, t in model.state_dict().items()} == expected


def test_what_does_not_fit_is_a_sentence(shared_misad):
    torch.manual_seed(7)
    with pytest.raises(Exception, match="budget of .* is too small"):
        with misa.empty_init(**options(shared_misad, 5 * MIB)):
            Wide()
    gc.collect()
    with pytest.raises(ValueError, match="must be one of"):
        misa.empty_init(budget="1GiB", mode="magic")
    with pytest.raises(ValueError, match="above 0"):
        misa.empty_init(budget=0)
    misa.manage(*_small(), **options(shared_misad, 4 * MIB)).release()


LARGE = """
import sys, misa, torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(7)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048) for _ in range({layers}))
if {managed}:
    torch.zeros(1).add_(1)
    print("ready", flush=True)
    sys.stdin.readline()
    with misa.empty_init(budget={budget}, daemon="private", disk="{disk}"):
        model = Model()
else:
    print("ready", flush=True)
    sys.stdin.readline()
    model = Model()
import hashlib
digest = hashlib.sha256()
for p in model.parameters():
    with misa.resident(p):
        digest.update(memoryview(p.detach().reshape(-1).numpy()))
print("sha256", digest.hexdigest(), flush=True)
print("peak", misa.memory.peak_bytes(), flush=True)
"""


def test_a_model_larger_than_the_memory_there_is(folder):
    """256 MiB of weights, and a memory cgroup that the kernel holds 144 MiB above what the bare interpreter takes."""
    layers, budget = 16, 96 * MIB
    with TrainerProcess(folder, program=LARGE.format(layers=layers, managed=False, budget=0, disk=folder)) as trainer:
        trainer.line("ready")
        trainer.go_on()
        expected = trainer.line("sha256")
        trainer.end()
    try:
        group = MemoryCgroup("creation")
    except CgroupUnavailable as error:
        pytest.skip(str(error))
    with group:
        program = "import os\n" + LARGE.format(layers=layers, managed=True, budget=budget, disk=folder)
        join = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        with TrainerProcess(folder, program=join + program) as trainer:
            (group._path / "cgroup.procs").write_text(str(trainer.pid), encoding="ascii")
            trainer.line("ready")
            group.set_limit(group.usage_bytes() + 144 * MIB)
            trainer.go_on()
            assert trainer.line("sha256") == expected
            assert int(trainer.line("peak")) <= budget
            trainer.end()
        assert group.oom_kills() == 0
