"""What training loops do besides the plain step, for any family and optimizer: the same code runs plain and managed."""

from __future__ import annotations

import copy
import dataclasses
import gc
import hashlib
import tempfile
from pathlib import Path
from typing import Any, Callable, Iterable

import misa
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from tests.exactness.families import Family, batch_of, loss_of, seed_everything

STEPS = 3
LATER = ("deferred", "eager")  # for what "in_backward" asks its user not to do
ALL = ("deferred", "in_backward", "eager")

Result = tuple[Any, Any, list[Any]]  # models, optimizers, whatever was looked at on the way


@dataclasses.dataclass(frozen=True)
class Case:
    family: Family
    make_optimizer: Callable[[Any], Optimizer]

    def model(self) -> nn.Module:
        seed_everything(7)
        return self.family.make()

    def start(self) -> tuple[nn.Module, Optimizer]:
        model = self.model()
        return model, self.make_optimizer(model.parameters())

    def loss(self, model: nn.Module, step: int, rows: int = 2) -> torch.Tensor:
        return loss_of(self.family, model, step, rows)


@dataclasses.dataclass(frozen=True)
class Loop:
    name: str
    run: Callable[[Case, Callable[..., Any]], Result]
    modes: tuple[str, ...]
    fits: Callable[[Family], bool]


LOOPS: dict[str, Loop] = {}


def loop(name: str, modes: tuple[str, ...] = ALL, fits: Callable[[Family], bool] = lambda _: True) -> Any:
    def register(run: Callable[[Case, Callable[..., Any]], Result]) -> Callable[[Case, Callable[..., Any]], Result]:
        LOOPS[name] = Loop(name, run, modes, fits)
        return run

    return register


def bits_of(tensors: Iterable[torch.Tensor]) -> str:
    """A digest of the tensors' bytes, each on the device only while it is read."""
    digest = hashlib.sha256()
    for tensor in tensors:
        with torch.no_grad(), misa.resident(tensor):
            flat = tensor.detach().contiguous().reshape(-1)
            if flat.numel():
                digest.update(memoryview(flat.view(torch.uint8).numpy()))
            del flat
    return digest.hexdigest()


def one_step(case: Case, model: nn.Module, optimizer: Optimizer, step: int) -> float:
    optimizer.zero_grad()
    loss = case.loss(model, step)
    loss.backward()
    optimizer.step()
    return loss.item()


def leaf_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(n, m) for n, m in model.named_modules()
            if not any(m.children()) and any(True for _ in m.parameters(recurse=False))]


def middle_of(model: nn.Module) -> nn.Module:
    leaves = leaf_modules(model)
    return leaves[len(leaves) // 2][1]


# ----------------------------------------------------------------------------------------------- the step itself


@loop("plain")
def plain(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        losses = [one_step(case, model, optimizer, step) for step in range(STEPS)]
    return model, optimizer, losses


@loop("accumulation", LATER)
def accumulation(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                (case.loss(model, 10 * step + part) / 3).backward()
            optimizer.step()
    return model, optimizer, []


def _clipped(case: Case, manage: Any, clip: Callable[[nn.Module], Any]) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            case.loss(model, step).backward()
            seen.append(clip(model))
            optimizer.step()
    return model, optimizer, seen


@loop("clipping by norm", LATER)
def clip_norm(case: Case, manage: Any) -> Result:
    return _clipped(case, manage, lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1).item())


@loop("clipping by value", LATER)
def clip_value(case: Case, manage: Any) -> Result:
    return _clipped(case, manage, lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.001))


@loop("autocast")
def autocast(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = case.loss(model, step)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, optimizer, seen


@loop("GradScaler", LATER)
def grad_scaler(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    # So high that the first step overflows and is left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100, growth_interval=2)
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = case.loss(model, step)
            scaler.scale(loss).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                seen.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
    return model, optimizer, seen


def _recomputed(case: Case, manage: Any, reentrant: bool) -> Result:
    model, optimizer = case.start()
    inside = getattr(model, "supports_gradient_checkpointing", False)
    if inside:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def loss_at(step: int) -> torch.Tensor:
        if inside:
            return case.loss(model, step)
        # A reentrant checkpoint needs an input that asks for a gradient.
        return checkpoint(lambda _: case.loss(model, step), torch.zeros((), requires_grad=True), use_reentrant=reentrant)

    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_at(step)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, optimizer, seen


@loop("recomputation, reentrant", LATER)
def recomputed_reentrant(case: Case, manage: Any) -> Result:
    return _recomputed(case, manage, True)


@loop("recomputation, by hooks")
def recomputed_by_hooks(case: Case, manage: Any) -> Result:
    return _recomputed(case, manage, False)


@loop("gradients set to zero", LATER)
def zeroed(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            case.loss(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@loop("model.zero_grad after forward", LATER)
def zero_after_forward(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            loss = case.loss(model, step)
            model.zero_grad()
            loss.backward()
            optimizer.step()
    return model, optimizer, []


@loop("closure", LATER)
def closures(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = case.loss(model, step)  # noqa: B023: called at once
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).item())
    return model, optimizer, seen


@loop("second backward", LATER)
def second_backward(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = case.loss(model, step)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            optimizer.step()
    return model, optimizer, []


@loop("step twice", LATER)
def step_twice(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            case.loss(model, step).backward()
            optimizer.step()
            optimizer.step()
    return model, optimizer, []


@loop("gradients read and changed", LATER)
def gradients_changed(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            case.loss(model, step).backward()
            for number, parameter in enumerate(model.parameters()):
                if parameter.grad is None:
                    continue
                if number % 3 == 0:
                    parameter.grad.mul_(0.5)
                elif number % 3 == 1:
                    parameter.grad = parameter.grad * 2
            seen.append(bits_of(p.grad for p in model.parameters() if p.grad is not None))
            optimizer.step()
            seen.append(bits_of(p.grad for p in model.parameters() if p.grad is not None))
    return model, optimizer, seen


# ------------------------------------------------------------------------------------ optimizers, groups, schedules


@loop("two optimizers")
def two_optimizers(case: Case, manage: Any) -> Result:
    model = case.model()
    optimizers = [
        case.make_optimizer([p for p in model.parameters() if p.dim() > 1]),
        torch.optim.SGD([p for p in model.parameters() if p.dim() <= 1], lr=1e-2, momentum=0.9),
    ]
    with manage(model, optimizers):
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            case.loss(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model, optimizers, []


@loop("parameter groups")
def parameter_groups(case: Case, manage: Any) -> Result:
    model = case.model()
    optimizer = case.make_optimizer([
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 1e-3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 1e-2, "weight_decay": 0.0},
    ])
    with manage(model, optimizer):
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            for group in optimizer.param_groups:
                group["lr"] *= 0.7
    return model, optimizer, []


@loop("schedules")
def schedules(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    seen: list[Any] = []
    with manage(model, optimizer):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for step in range(STEPS + 1):
            loss = one_step(case, model, optimizer, step)
            before.step()
            plateau.step(loss + step)
            seen.append(optimizer.param_groups[0]["lr"])
    return model, optimizer, seen


@loop("optimizer state read", LATER)
def optimizer_state_read(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen: list[Any] = []
    with manage(model, optimizer):
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            for parameter in model.parameters():
                for key, value in optimizer.state[parameter].items() if parameter in optimizer.state else ():
                    seen.append((key, bits_of([value]) if isinstance(value, torch.Tensor) else str(value)))
    return model, optimizer, seen


@loop("optimizer state loaded back", LATER)
def optimizer_state_loaded(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(2):
            one_step(case, model, optimizer, step)
        kept = optimizer.state_dict()
        kept["state"] = {i: {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()}
                         for i, values in kept["state"].items()}
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        one_step(case, model, optimizer, 2)
        model.load_state_dict(weights)
        optimizer.load_state_dict(kept)
        del kept, weights
        for step in range(2, 4):
            one_step(case, model, optimizer, step)
    return model, optimizer, []


# ------------------------------------------------------------------------------------------------ saving and loading


def _torch_save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")


def _torch_load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    saved = torch.load(folder / "saved.pt")
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


def _misa_save(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    # Small shards, so that there are several.
    misa.save(folder / "saved", model=model, optimizer=optimizer, shard_bytes=1 << 18)


def _misa_load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    misa.load(folder / "saved", model=model, optimizer=optimizer)


Saver = Callable[[Path, nn.Module, Optimizer], None]


def _loaded_back(case: Case, manage: Any, save: Saver, load: Saver) -> Result:
    """A step is taken back by what was saved before it."""
    model, optimizer = case.start()
    seen = []
    with tempfile.TemporaryDirectory(prefix="misa-x-", dir="/tmp") as folder, manage(model, optimizer):
        for step in range(2):
            one_step(case, model, optimizer, step)
        optimizer.zero_grad()
        save(Path(folder), model, optimizer)
        seen.append(one_step(case, model, optimizer, 70))
        optimizer.zero_grad()
        load(Path(folder), model, optimizer)
        seen.append(bits_of(model.parameters()))
        for step in range(2, 4):
            seen.append(one_step(case, model, optimizer, step))
        save(Path(folder), model, optimizer)  # over the earlier one
    return model, optimizer, seen


def _resumed(case: Case, manage: Any, save: Saver, load: Saver) -> Result:
    """The training stops, and goes on with a model and an optimizer that are new."""
    model, optimizer = case.start()
    seen = []
    with tempfile.TemporaryDirectory(prefix="misa-x-", dir="/tmp") as folder:
        with manage(model, optimizer):
            for step in range(2):
                one_step(case, model, optimizer, step)
            save(Path(folder), model, optimizer)
        del model, optimizer
        gc.collect()
        seed_everything(99)
        model = case.family.make()
        optimizer = case.make_optimizer(model.parameters())
        with manage(model, optimizer):
            load(Path(folder), model, optimizer)
            for step in range(2, 4):
                seen.append(one_step(case, model, optimizer, step))
    return model, optimizer, seen


@loop("saved and loaded back, torch.save", LATER)
def torch_loaded_back(case: Case, manage: Any) -> Result:
    return _loaded_back(case, manage, _torch_save, _torch_load)


@loop("saved and loaded back, misa.save", LATER)
def misa_loaded_back(case: Case, manage: Any) -> Result:
    return _loaded_back(case, manage, _misa_save, _misa_load)


@loop("resumed in a new model, torch.save")
def torch_resumed(case: Case, manage: Any) -> Result:
    return _resumed(case, manage, _torch_save, _torch_load)


@loop("resumed in a new model, misa.save")
def misa_resumed(case: Case, manage: Any) -> Result:
    return _resumed(case, manage, _misa_save, _misa_load)


# --------------------------------------------------------------------------------------------- between the steps


@loop("evaluation and generation between")
def evaluation(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen: list[Any] = []
    with manage(model, optimizer):
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            model.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                seen.append(case.loss(model, 50).item())
            if case.family.generates:
                tokens = batch_of(case.family, 60)["input_ids"][:, :4]
                out = model.generate(input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=4,
                                     do_sample=step == 1)
                seen.append(out.tolist())
            model.train()
    return model, optimizer, seen


@loop("frozen and thawed")
def frozen_and_thawed(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    parameters = list(model.parameters())
    part = parameters[len(parameters) // 3 : 2 * len(parameters) // 3]
    for parameter in part[::2]:
        parameter.requires_grad_(False)  # these from the beginning
    with manage(model, optimizer):
        for step in range(STEPS + 2):
            if step:
                for parameter in part:
                    parameter.requires_grad_(step % 3 != 1)
            one_step(case, model, optimizer, step)
    return model, optimizer, []


@loop("weights changed by hand")
def weights_changed(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    with manage(model, optimizer):
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            parameters = [p for p in model.parameters() if p.numel() > 1]
            with torch.no_grad():
                parameters[step].mul_(0.9)
                parameters[-1 - step].data.add_(0.01)
                nn.init.zeros_(parameters[len(parameters) // 2])
                parameters[len(parameters) // 3].view(-1)[1:] = 0.05
    return model, optimizer, []


@loop("moving average")
def moving_average(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5), use_buffers=False)
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            average.update_parameters(model)
            seen.append(bits_of(average.module.parameters()))
        del average
    return model, optimizer, seen


@loop("deep copies")
def deep_copies(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            one_step(case, model, optimizer, step)
            if step == 1:
                # The copy is a model of its own: it trains, and nothing of it reaches the first.
                other = copy.deepcopy(model)
                theirs = case.make_optimizer(other.parameters())
                one_step(case, other, theirs, 90)
                seen.append(bits_of(other.parameters()))
                del other, theirs
    return model, optimizer, seen


class Interruption(KeyboardInterrupt):
    """What Ctrl-C raises; a class of its own, so that nobody's real one is caught."""


@loop("interrupted in forward")
def interrupted_in_forward(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    caught = 0

    def interrupt(*_: Any) -> None:
        raise Interruption

    with manage(model, optimizer):
        for step in range(STEPS):
            handle = middle_of(model).register_forward_hook(interrupt)
            try:
                case.loss(model, step)
            except Interruption:
                caught += 1
            handle.remove()
            one_step(case, model, optimizer, step)
    return model, optimizer, [caught]


@loop("interrupted in backward", LATER)
def interrupted_in_backward(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    caught = 0

    def interrupt(*_: Any) -> None:
        raise Interruption

    with manage(model, optimizer):
        for step in range(STEPS):
            handle = next(middle_of(model).parameters(recurse=False)).register_hook(interrupt)
            try:
                case.loss(model, step).backward()
            except Interruption:
                caught += 1
            handle.remove()
            if step % 2:  # else what was accumulated so far goes into the step
                optimizer.zero_grad()
            case.loss(model, step).backward()
            optimizer.step()
    return model, optimizer, [caught]


# --------------------------------------------------------------------------------- more than one model, more processes


def _output(family: Family, model: nn.Module, step: int) -> torch.Tensor:
    batch = batch_of(family, step)
    if family.needs == ("transformers",):
        out = model(**batch)
        return out.logits if "logits" in out else out.logits_per_image
    return model(next(iter(batch.values())))


@loop("two models against each other", LATER)
def adversaries(case: Case, manage: Any) -> Result:
    generator = case.model()
    with torch.no_grad():
        width = _output(case.family, generator, 0).shape[-1]
    critic = nn.Sequential(nn.Linear(width, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    optimizers = [case.make_optimizer(generator.parameters()), case.make_optimizer(critic.parameters())]
    seen = []
    with manage([generator, critic], optimizers):
        for step in range(STEPS):
            made = _output(case.family, generator, step)
            optimizers[0].zero_grad()
            (critic(made).mean() + 0.1 * made.square().mean()).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            real = torch.randn(made.shape, generator=torch.Generator().manual_seed(step))
            gap = critic(made.detach()).mean() - critic(real).mean()
            gap.backward()
            optimizers[1].step()
            seen.append(gap.item())
            del made
    return [generator, critic], optimizers, seen


class _Batches(Dataset):
    def __init__(self, family: Family) -> None:
        self.family = family

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        return batch_of(self.family, step)


@loop("forked data-loader workers")
def forked_workers(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        one_step(case, model, optimizer, 20)
        loader = DataLoader(_Batches(case.family), batch_size=None, num_workers=2, multiprocessing_context="fork")
        for batch in loader:
            optimizer.zero_grad()
            loss = case.family.loss(model, batch)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, optimizer, seen


# -------------------------------------------------------------------------------------------------------- adapters


def _adapter_targets(model: nn.Module) -> list[str]:
    """Some of the model's matrices that LoRA can stand beside, none of them tied."""
    counts: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            counts[id(parameter)] = counts.get(id(parameter), 0) + 1
    names = [name for name, module in model.named_modules()
             if (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and counts[id(module.weight)] == 1
             and not name.endswith("out_proj")]  # state-space models read that weight past its module
    return names[:: max(1, len(names) // 6)][:6]


def has_adapter_targets(family: Family) -> bool:
    # Its matrices are of a class of their own that LoRA does not know. Said here rather than found out, so that choosing the
    # rows makes no model.
    return family.name != "falcon"


def _lora(model: nn.Module) -> Any:
    from peft import LoraConfig, get_peft_model

    targets = _adapter_targets(model)
    transposed = any(type(m).__name__ == "Conv1D" for m in model.modules())
    torch.manual_seed(11)
    return get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets, fan_in_fan_out=transposed))


@loop("LoRA on a frozen model", fits=has_adapter_targets)
def lora(case: Case, manage: Any) -> Result:
    model = _lora(case.model())
    optimizer = case.make_optimizer([p for p in model.parameters() if p.requires_grad])
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            loss = case.family.loss(model, batch_of(case.family, step))
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
            if step == 1:
                # Evaluated with the adapters folded into the weights, and back.
                model.merge_adapter()
                with torch.no_grad():
                    seen.append(case.family.loss(model, batch_of(case.family, 50)).item())
                model.unmerge_adapter()
    return model, optimizer, seen


@loop("LoRA added and removed", LATER, fits=has_adapter_targets)
def lora_on_the_way(case: Case, manage: Any) -> Result:
    model, optimizer = case.start()
    seen = []
    with manage(model, optimizer):
        for step in range(2):
            one_step(case, model, optimizer, step)
        optimizer.zero_grad()
        adapted = _lora(model)
        optimizer.add_param_group({"params": [p for p in adapted.parameters() if p.requires_grad]})
        for step in range(2, 5):
            seen.append(one_step(case, adapted.get_base_model(), optimizer, step))
        seen.append(bits_of(p for n, p in adapted.named_parameters() if "lora_" in n))
        optimizer.zero_grad()
        model = adapted.merge_and_unload()
        for parameter in optimizer.param_groups.pop()["params"]:
            optimizer.state.pop(parameter, None)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        for step in range(5, 7):
            seen.append(one_step(case, model, optimizer, step))
        del adapted
    return model, optimizer, seen
