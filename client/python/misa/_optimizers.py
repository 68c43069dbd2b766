"""What is known of optimizers: which step one parameter at a time, and how much state each keeps."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any, Callable, Iterator

import torch
from torch.optim import Optimizer

# States of a parameter's own size that the optimizer keeps, from its group's options. An optimizer is listed here only
# if its step of one parameter depends on nothing but that parameter, its gradient, its state and its group's options.
_STATE_COPIES: dict[type, Callable[[dict[str, Any]], float]] = {
    torch.optim.Adam: lambda g: 3 if g.get("amsgrad") else 2,
    torch.optim.AdamW: lambda g: 3 if g.get("amsgrad") else 2,
    torch.optim.NAdam: lambda g: 2,
    torch.optim.RAdam: lambda g: 2,
    torch.optim.Adamax: lambda g: 2,
    torch.optim.SGD: lambda g: 1 if g.get("momentum") else 0,
    torch.optim.RMSprop: lambda g: 1 + bool(g.get("momentum")) + bool(g.get("centered")),
    torch.optim.Adadelta: lambda g: 2,
    torch.optim.Rprop: lambda g: 2,
    torch.optim.ASGD: lambda g: 1,
    torch.optim.Adafactor: lambda g: 0,
}


# Optimizers from outside torch of the same kind, by the name of their class: misa needs none of their packages.
_OUTSIDE_STATE_COPIES: dict[str, Callable[[dict[str, Any]], float]] = {
    "lion_pytorch.lion_pytorch.Lion": lambda g: 1,
    "transformers.optimization.Adafactor": lambda g: 1 if g.get("beta1") is not None else 0,
}


def _state_copies(optimizer: Optimizer) -> Callable[[dict[str, Any]], float] | None:
    kind = type(optimizer)
    return _STATE_COPIES.get(kind) or _OUTSIDE_STATE_COPIES.get(f"{kind.__module__}.{kind.__qualname__}")


# Temporary tensors of a step that live at once, in copies of the parameter (measured; without weight decay).
_STEP_COPIES: dict[type, int] = {
    torch.optim.Adam: 2,
    torch.optim.AdamW: 2,
    torch.optim.NAdam: 2,
    torch.optim.RAdam: 5,
    torch.optim.Adamax: 1,
    torch.optim.SGD: 1,
    torch.optim.RMSprop: 2,
    torch.optim.Adadelta: 2,
    torch.optim.Rprop: 3,
    torch.optim.ASGD: 1,
    torch.optim.Adafactor: 2,
}


def is_known(optimizer: Optimizer) -> bool:
    """Its class itself is listed; a subclass may do anything in its step."""
    return _state_copies(optimizer) is not None


def is_separable(optimizer: Optimizer) -> bool:
    """Known, or its author says so with a class attribute `misa_separable = True`."""
    return is_known(optimizer) or bool(getattr(optimizer, "misa_separable", False))


def expected_state_bytes(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """Bytes of state the optimizer will keep for one parameter; 0 where that is not known."""
    copies = _state_copies(optimizer)
    if copies is None:
        return 0
    return int(copies(group) * parameter.numel() * parameter.element_size())


def step_bytes(optimizer: Optimizer, group: dict[str, Any], parameter: torch.Tensor) -> int:
    """Bytes of temporary tensors that a step of one parameter needs; 0 where that is not known."""
    if group.get("fused"):
        return 0
    # Two for those from outside.
    copies = _STEP_COPIES.get(type(optimizer), 2 if is_known(optimizer) else 0)
    decoupled = isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adafactor)) or group.get("decoupled_weight_decay")
    if copies and (group.get("maximize") or (group.get("weight_decay") and not decoupled)):
        copies += 1
    return copies * parameter.numel() * parameter.element_size()


def raw_step(optimizer: Optimizer) -> Callable[[], Any]:
    """The class's own step, without the hooks that torch wraps around it: those run once for each step, not once for each
    module."""
    step = type(optimizer).step
    step = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
    return lambda: step(optimizer)


def snapshot_group(group: dict[str, Any]) -> dict[str, Any]:
    """A group's options as they are now; tensors (a learning rate that is one) are copied, since they change in place."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value)
        for key, value in group.items()
        if key != "params"
    }


def snapshot_scaling(optimizer: Optimizer, cloned: bool = True) -> dict[str, torch.Tensor]:
    """What a GradScaler has set on a fused optimizer for its next step, and takes away after it."""
    found = {name: optimizer.__dict__[name] for name in ("grad_scale", "found_inf") if name in optimizer.__dict__}
    return {name: value.clone() if cloned and isinstance(value, torch.Tensor) else value for name, value in found.items()}


class WatchedState(defaultdict):
    """An optimizer's state that calls `look(parameter)` before somebody sees a parameter's part of it, and
    `look(WatchedState.ALL)` before somebody sees all of it."""

    ALL = object()

    def __init__(self, state: Any, look: Callable[[Any], None]) -> None:
        super().__init__(dict, state)
        self._look = look

    @staticmethod
    def plain(state: Any) -> Any:
        if not isinstance(state, WatchedState):
            return state
        state._look = lambda _: None
        return defaultdict(dict, state)

    def __getitem__(self, key: Any) -> Any:
        self._look(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._look(key)
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._look(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._look(key)
        return super().pop(key, *default)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        self._look(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[Any]:
        self._look(self.ALL)
        return super().__iter__()

    def __len__(self) -> int:
        self._look(self.ALL)
        return super().__len__()

    def keys(self) -> Any:
        self._look(self.ALL)
        return super().keys()

    def values(self) -> Any:
        self._look(self.ALL)
        return super().values()

    def items(self) -> Any:
        self._look(self.ALL)
        return super().items()

    def copy(self) -> Any:
        self._look(self.ALL)
        return defaultdict(dict, super().items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        # Copies and pickles are plain ones.
        self._look(self.ALL)
        return defaultdict, (dict,), None, None, iter(list(super().items()))


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors_in(inner)


def state_tensors(optimizer: Optimizer, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every tensor of the optimizer's state for these parameters, nested ones too."""
    # No function inside that calls itself: such a cycle would keep the tensors alive until the next garbage collection.
    return [t for p in parameters if p in optimizer.state for t in _tensors_in(optimizer.state[p])]
