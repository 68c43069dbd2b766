"""Parameters that come to a managed model and leave it again: adapters, new heads.

What an optimizer is given later goes behind the pool at its next step(). What neither a model nor an optimizer has any more
is let go of, so that its memory is free once nobody else holds it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Iterable

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedTensorMixin
from torch.optim import Optimizer

from ._optimizers import expected_state_bytes, step_bytes

if TYPE_CHECKING:
    from ._manage import Run

# A parameter can leave without a word (`del model.part`): after so many steps all are looked over.
_STEPS_BETWEEN_LOOKS = 64
_MOST_NAMES = 4


class Members:
    """Keeps a run's parameters those of its models and optimizers. Open between `open` and `close`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._changed = False  # a module got a part, or an optimizer's groups are others, since the last look
        self._counts: dict[int, int] = {}
        self._handles: list[Any] = []

    def open(self) -> None:
        self._counts = {id(optimizer): _count(optimizer) for optimizer in self._run._optimizers}

        def changed(*_: Any) -> None:
            self._changed = True

        self._handles = [register_module_module_registration_hook(changed),
                         register_module_parameter_registration_hook(changed)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def at_step(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step: what it was given since the last one is managed from here on."""
        run = self._run
        count = _count(optimizer)
        fresh = [p for group in optimizer.param_groups for p in group["params"]
                 if id(p) not in run._module_of and id(p) not in run._left_alone]
        if fresh or self._counts.get(id(optimizer)) != count:
            self._counts[id(optimizer)] = count
            self._changed = True
        if fresh:
            self.adopt(fresh)

    def at_boundary(self) -> None:
        if self._changed or self._run._steps % _STEPS_BETWEEN_LOOKS == 0:
            self._changed = False
            self._let_go()

    def adopt(self, fresh: Iterable[torch.Tensor] = ()) -> list[str]:
        """Manages these parameters, and all that have come to the models since. Returns the names of those that are managed
        now and were not before."""
        from ._manage import _named_parameters

        run, manager = self._run, self._run._manager
        assert manager is not None
        names = {id(p): name for name, p in _named_parameters(run._models)}
        owners = {id(p): (o, g) for o in run._optimizers for g in o.param_groups for p in g["params"]}
        inputs: list[tuple[str, torch.Tensor, int, int]] = []
        alone: list[str] = []
        why = "They are no dense tensors in CPU memory."
        seen: set[int] = set()
        for parameter in [*fresh, *(p for model in run._models for p in model.parameters())]:
            key = id(parameter)
            if key in seen or key in run._module_of or key in run._left_alone:
                continue
            seen.add(key)
            if isinstance(parameter, UninitializedTensorMixin):
                continue  # a lazy module's; it is made in the first forward
            name = names.get(key, f"{type(owners[key][0]).__name__}.{len(run._keep) + len(inputs)}" if key in owners else "")
            module = manager.module_of(parameter)
            if module >= 0:
                # A new name for what is managed already.
                run._keep.append(parameter)  # an id must not be given to another tensor
                run._module_of[key] = module
                run._module_parameters[module].append(parameter)
            elif parameter.device.type != "cpu" or parameter.layout != torch.strided or parameter.numel() == 0:
                self._leave_alone(parameter)
                if parameter.numel():
                    alone.append(name)
            elif key in owners:
                inputs.append((name, parameter, expected_state_bytes(*owners[key], parameter),
                               step_bytes(*owners[key], parameter)))
            else:
                inputs.append((name, parameter, 0, 0))
        adopted: list[str] = []
        if inputs:
            first = len(run._parameters)
            modules, refusal = manager.adopt_later(inputs)
            run._parameters += [None] * (manager.parameter_count() - first)
            run._modules = manager.modules()
            run._module_parameters += [[] for _ in range(len(run._modules) - len(run._module_parameters))]
            for number, (name, parameter, _, _) in enumerate(inputs):
                if modules[number] < 0:
                    self._leave_alone(parameter)
                    alone.append(name)
                    why = refusal
                    continue
                run._parameters[first + number] = parameter
                run._place[id(parameter)] = first + number
                run._module_of[id(parameter)] = modules[number]
                run._module_parameters[modules[number]].append(parameter)
                adopted.append(name)
        if alone:
            more = f" and {len(alone) - _MOST_NAMES} more" if len(alone) > _MOST_NAMES else ""
            listed = ", ".join(alone[:_MOST_NAMES]) + more
            print(f"misa: parameters that came later stay in ordinary memory and count against the budget ({listed}): {why} "
                  "They are trained exactly all the same.", file=sys.stderr)
        return adopted

    def _leave_alone(self, parameter: torch.Tensor) -> None:
        self._run._keep.append(parameter)  # an id must not be given to another tensor
        self._run._left_alone.add(id(parameter))

    def _let_go(self) -> None:
        run, manager = self._run, self._run._manager
        assert manager is not None
        if run._sampling is not None:
            return  # its draws are of all the parameters of the beginning
        alive = {id(p) for model in run._models for p in model.parameters()}
        alive.update(id(p) for optimizer in run._optimizers for group in optimizer.param_groups for p in group["params"])
        gone = [key for key in run._module_of if key not in alive]
        for module in {run._module_of[key] for key in gone}:
            if manager.is_pending(module):
                manager.step_module(module)
        places: list[int] = []
        for key in gone:
            module = run._module_of.pop(key)
            run._module_parameters[module] = [p for p in run._module_parameters[module] if id(p) != key]
            run._stepped_early.discard(key)
            place = run._place.pop(key, None)
            if place is not None:
                places.append(place)
                run._parameters[place] = None
        run._left_alone &= alive
        run._keep = [p for p in run._keep if id(p) in alive]
        if places:
            manager.forget(places)
            run._modules = manager.modules()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)
