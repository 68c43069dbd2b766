"""What training loops do besides the plain step, each with the bits of the same loop without misa."""

from __future__ import annotations

import functools
from typing import Any, Callable

import misa
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, before anything is managed

from tests.python.beside import PRESSURES, assert_identical, managed, plain_once
from tests.python.models import Mlp, Transformer, batch, loss_of

STEPS = 3
LATER = ("deferred", "eager")  # for what "in_backward" asks its user not to do
ALL = ("deferred", "in_backward", "eager")

Result = tuple[nn.Module, Any, list[Any]]
LOOPS: list[tuple[str, Callable[..., Result], str, float]] = []


def feature(modes: tuple[str, ...] = ALL, share: float = 0.5) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Makes a loop one test for each step mode and pressure."""

    def register(loop: Callable[..., Result]) -> Callable[..., Result]:
        for mode in modes:
            LOOPS.append((loop.__name__, loop, mode, share))
        return loop

    return register


def transformer(**options: Any) -> Transformer:
    torch.manual_seed(7)
    return Transformer(**options)


def adamw(parameters: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, **{"lr": 3e-3, "weight_decay": 0.1, **options})


def clipped(clip: Callable[[nn.Module], Any]) -> Callable[..., Result]:
    def loop(manage: Any) -> Result:
        model = transformer()
        optimizer = adamw(model.parameters())
        seen = []
        with manage(model, optimizer):
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                seen.append(clip(model))
                optimizer.step()
        return model, optimizer, seen

    return loop


@feature(LATER)
def clip_norm(manage: Any) -> Result:
    return clipped(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.3).item())(manage)


@feature(LATER)
def clip_norm_imported_by_name(manage: Any) -> Result:
    return clipped(lambda m: clip_grad_norm_(m.parameters(), 0.3, foreach=True).item())(manage)


@feature(LATER)
def clip_norm_of_order_inf(manage: Any) -> Result:
    return clipped(lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")).item())(manage)


@feature(LATER)
def clip_value(manage: Any) -> Result:
    return clipped(lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 0.002))(manage)


@feature(LATER)
def clip_value_imported_by_name(manage: Any) -> Result:
    return clipped(lambda m: clip_grad_value_(list(m.parameters()), 0.002, foreach=True))(manage)


@feature(LATER)
def clip_in_two_calls(manage: Any) -> Result:
    def clip(model: nn.Module) -> float:
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.3, norm)
        return norm.item()

    return clipped(clip)(manage)


@feature(LATER)
def gradient_accumulation(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                (loss_of(model, 10 * step + part) / 3).backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def gradients_set_to_zero(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def set_to_zero_by_the_model(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS + 3):
            model.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def gradients_set_to_zero_by_one_operator(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters(), foreach=True)
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def zero_grad_after_forward(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            loss = loss_of(model, step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def gradients_looked_at(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            seen.append([p.grad.abs().sum().item() for p in model.parameters()])
            optimizer.step()
            seen.append([p.grad.abs().max().item() for p in model.parameters()])
            seen.append([p.abs().sum().item() for p in model.parameters()])
    return model, optimizer, seen


def scheduled(manage: Any, make: Callable[..., Any], before: bool) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    scheduler = make(optimizer) if before else None
    seen = []
    with manage(model, optimizer):
        scheduler = scheduler or make(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            scheduler.step()
            seen.append(scheduler.get_last_lr())
    return model, optimizer, seen


@feature(ALL)
def scheduler_made_before(manage: Any) -> Result:
    return scheduled(manage, functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5), True)


@feature(ALL)
def scheduler_made_after(manage: Any) -> Result:
    return scheduled(manage, functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=STEPS), False)


@feature(ALL)
def evaluation_and_generation_between(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    seen: list[Any] = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            model.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                seen.append(loss_of(model, 50).item())
                tokens = batch(model, 60, 1)[0][:, :2]
                for _ in range(4):
                    tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
                seen.append(tokens.tolist())
            model.train()
    return model, optimizer, seen


def recomputed(manage: Any, how: str) -> Result:
    model = transformer(recompute=how)
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def recomputation_reentrant(manage: Any) -> Result:
    return recomputed(manage, "reentrant")


@feature(ALL)
def recomputation_by_hooks(manage: Any) -> Result:
    return recomputed(manage, "hooks")


@feature(ALL, share=0.6)
def autocast(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return model, optimizer, seen


@feature(LATER, share=0.6)
def autocast_around_everything(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer), torch.autocast("cpu", dtype=torch.bfloat16):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def weights_of_half_precision(manage: Any) -> Result:
    model = transformer(width=160).bfloat16()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def two_groups(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw([
        {"params": [p for p in model.parameters() if p.dim() > 1], "lr": 1e-3},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-2, "weight_decay": 0.0},
    ])
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
    return model, optimizer, []


@feature(ALL)
def frozen_parameters(manage: Any) -> Result:
    model = transformer()
    for parameter in [*model.blocks[0].parameters(), model.blocks[1].query.weight]:
        parameter.requires_grad_(False)
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def frozen_and_thawed_on_the_way(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS + 2):
            for parameter in model.blocks[1].parameters():
                parameter.requires_grad_(step % 3 != 1)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def weights_changed_in_place(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            with torch.no_grad():
                model.blocks[step % 3].up.weight.mul_(0.9)
                model.blocks[0].down.weight.data.add_(0.01)
                nn.init.zeros_(model.blocks[1].key.bias)
                model.blocks[2].query.weight[3, 4:9] = 0.5
    return model, optimizer, []


@feature(ALL)
def branches_that_depend_on_data(manage: Any) -> Result:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS + 2):
            inputs, targets = batch(model, step)
            optimizer.zero_grad()
            h = inputs
            for number, block in enumerate(model.blocks):
                if (step + number) % 3:
                    h = torch.tanh(block(h))
            nn.functional.cross_entropy(model.head(h), targets).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL, share=0.7)
def shared_layers_and_views(manage: Any) -> Result:
    torch.manual_seed(7)
    model = Mlp()
    model.blocks[4] = model.blocks[1]
    # The second half of one matrix is another layer's weight.
    model.blocks[5].weight = nn.Parameter(model.blocks[2].weight.data[:, :])
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


class Interruption(BaseException):
    """Like KeyboardInterrupt: nobody catches it by accident."""


@feature(ALL)
def exception_in_forward(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    caught = 0

    def interrupt(*_: Any) -> None:
        raise Interruption

    with manage(model, optimizer):
        for step in range(STEPS):
            handle = model.blocks[step % 3].up.register_forward_hook(interrupt)
            try:
                loss_of(model, step)
            except Interruption:
                caught += 1
            handle.remove()
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, [caught]


@feature(LATER)
def exception_in_backward(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    caught = 0

    def interrupt(*_: Any) -> None:
        raise Interruption

    with manage(model, optimizer):
        for step in range(STEPS):
            handle = model.blocks[step % 3].up.weight.register_hook(interrupt)
            try:
                loss_of(model, step).backward()
            except Interruption:
                caught += 1
            handle.remove()
            if step % 2:  # else what was accumulated so far goes into the step
                optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, [caught]


@feature(ALL)
def two_optimizers(manage: Any) -> Result:
    model = transformer()
    optimizers = [
        adamw([p for p in model.parameters() if p.dim() > 1]),
        torch.optim.SGD([p for p in model.parameters() if p.dim() == 1], lr=1e-2, momentum=0.9),
    ]
    with manage(model, optimizers):
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(model, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    return model, optimizers, []


@feature(ALL)
def two_models_in_turn(manage: Any) -> Result:
    torch.manual_seed(7)
    both = nn.ModuleDict({"first": Mlp(), "second": Mlp()})
    optimizers = [adamw(both["first"].parameters()), adamw(both["second"].parameters(), lr=1e-3)]
    with manage(both, optimizers):
        for step in range(STEPS):
            for name, optimizer in zip(("first", "second"), optimizers):
                for _ in range(2):
                    optimizer.zero_grad()
                    loss_of(both[name], step).backward()
                    optimizer.step()
    return both, optimizers, []


@feature(LATER)
def retained_graph(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward(retain_graph=True)
            (loss * 0.5).backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def gradients_of_gradients(manage: Any) -> Result:
    torch.manual_seed(7)
    model = Mlp()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            inputs, _ = batch(model, step)
            inputs.requires_grad_()
            out = model(inputs).square().mean()
            (slope,) = torch.autograd.grad(out, inputs, create_graph=True)
            (out + slope.square().sum()).backward()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def step_with_closure(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            seen.append(optimizer.step(closure).item())
    return model, optimizer, seen


@feature(ALL)
def step_hooks(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, seen


@feature(ALL)
def several_steps_on_one_gradient(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if step == 2:
                for parameter in model.parameters():
                    parameter.grad = None
                optimizer.step()  # has nothing to do
    return model, optimizer, []


@feature(LATER)
def step_twice(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.step()
    return model, optimizer, []


@feature(LATER)
def gradients_made_by_hand(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            draw = torch.Generator().manual_seed(step)
            for parameter in model.blocks[1].parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draw)
            model.blocks[0].up.weight.grad.add_(0.1)
            optimizer.step()
    return model, optimizer, []


@feature(LATER, share=0.8)
def state_saved_and_loaded(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    kept: list[Any] = []
    with manage(model, optimizer):
        for step in range(STEPS + 2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            if step == 1:
                part = {k: v.clone() for k, v in model.blocks[0].state_dict().items()}
                saved = optimizer.state_dict()["state"]
                states = {i: {k: v.clone() for k, v in saved[i].items()} for i in range(4)}
                del saved
            if step == 3:
                # Back to where it was, for a part, right after a step that is still due.
                model.blocks[0].load_state_dict(part)
                saved = optimizer.state_dict()
                saved["state"].update(states)
                optimizer.load_state_dict(saved)
                kept.append(sorted(saved["state"]))
                del saved, states, part
    return model, optimizer, kept


def scaled(manage: Any, **options: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters(), **options)
    # So high that the first step overflows and is left out.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100, growth_interval=2)
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                seen.append(clip_grad_norm_(model.parameters(), 0.1).item())
            scaler.step(optimizer)
            scaler.update()
            seen.append(scaler.get_scale())
    return model, optimizer, seen


@feature(LATER)
def gradients_scaled(manage: Any) -> Result:
    return scaled(manage)


@feature(LATER)
def gradients_scaled_for_a_fused_optimizer(manage: Any) -> Result:
    """Here the optimizer itself unscales, in a step that may come long after the scaler took its word back."""
    return scaled(manage, fused=True)


@feature(ALL)
def optimizer_state_looked_at(manage: Any) -> Result:
    """Its counters are no tensors of ours, and are right all the same while a step is due."""
    model = transformer()
    optimizer = adamw(model.parameters())
    seen: list[Any] = []
    with manage(model, optimizer):
        for step in range(STEPS):
            seen.append((model.norm.weight in optimizer.state, len(optimizer.state)))
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            seen.append(optimizer.state[model.norm.weight]["step"].item())
            seen.append([value["step"].item() for value in optimizer.state.values()])
    assert type(optimizer.state) is type(torch.optim.AdamW([nn.Parameter(torch.ones(1))]).state)
    return model, optimizer, seen


@feature(ALL)
def parameters_added_and_removed(manage: Any) -> Result:
    """As adapters are: the model grows while it is managed, trains both, and loses the new part again."""
    model = transformer()
    optimizer = adamw(model.parameters())
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS + 4):
            if step == 2:
                torch.manual_seed(11)
                grown = nn.Sequential(nn.Linear(96, 160), nn.Tanh(), nn.Linear(160, 96))
                model.blocks.append(grown)
                optimizer.add_param_group({"params": list(grown.parameters()), "lr": 1e-2})
            if step == 5:
                seen.append([p.abs().sum().item() for p in grown.parameters()])
                del model.blocks[3], grown
                del optimizer.param_groups[1]
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, seen


@feature(ALL)
def thawed_on_the_way(manage: Any) -> Result:
    """Frozen when the management begins."""
    model = transformer()
    optimizer = adamw(model.parameters())
    for parameter in model.blocks[1].parameters():
        parameter.requires_grad_(False)
    with manage(model, optimizer):
        for step in range(STEPS + 1):
            if step == 1:
                for parameter in model.blocks[1].parameters():
                    parameter.requires_grad_(True)
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
    return model, optimizer, []


@feature(ALL)
def moving_average_of_weights(manage: Any) -> Result:
    model = transformer()
    optimizer = adamw(model.parameters())
    small = [model.norm.weight, model.blocks[1].up.weight]
    average = [p.detach().clone() for p in small]
    seen = []
    with manage(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            for kept, p in zip(average, small):
                kept.lerp_(p.detach(), 0.5)
            seen.append([a.sum().item() for a in average])
    return model, optimizer, seen


@pytest.mark.filterwarnings("error:Detected call of")  # a scheduler that missed step()
@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize(("name", "loop", "mode", "share"), LOOPS, ids=[f"{name}-{mode}" for name, _, mode, _ in LOOPS])
def test_feature(shared_misad, name, loop, mode, share, pressure):
    assert_identical(loop, shared_misad, pressure, step=mode, share=share)


@pytest.mark.parametrize("loop", [gradients_set_to_zero, gradients_set_to_zero_by_one_operator, set_to_zero_by_the_model,
                                  clip_norm, gradients_looked_at, frozen_and_thawed_on_the_way])
def test_where_everything_fits(shared_misad, loop):
    """Gradients stay in autograd's own memory then, where nobody sees that they are changed."""
    expected = plain_once(loop)
    result = managed(loop, shared_misad, misa.memory.live_bytes() + 4 * expected.bytes)
    assert (result.seen, result.sha256) == (expected.seen, expected.sha256)
