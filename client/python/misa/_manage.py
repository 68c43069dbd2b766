"""`misa.manage`: the one line, and the run it gives."""

from __future__ import annotations

import atexit
import contextlib
import os
import statistics
import sys
import threading
import types
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, Sequence

import torch
from torch.optim import Optimizer

from . import _C, _torch_save
from ._clip import by_module
from ._doctor import binary
from ._doors import Doors
from ._members import Members
from ._optimizers import (
    WatchedState,
    expected_state_bytes,
    is_known,
    is_separable,
    raw_step,
    snapshot_group,
    snapshot_scaling,
    state_tensors,
    step_bytes,
)
from ._sampling import Sampled, SamplingDriver, StepLoss
from ._tasks import Tasks, let_go, take_over
from ._wrappers import refuse_sharded, unwrap_model, unwrap_optimizer, world_size
from .emulated import Emulated, parse, with_compute
from .memory import Timeline

if TYPE_CHECKING:
    from ._creation import Growing

_MODES = ("exact", "sampled")
_STEPS = ("deferred", "in_backward", "eager")
_DAEMONS = ("auto", "required", "private")

# The least, the most (0: whatever there is) and whether the daemon chooses between them.
Budget = tuple[int, int, bool]

_current: Run | None = None
# A model made by misa.empty_init that no run has taken over yet.
_growing: Growing | None = None


def current_run() -> Run | None:
    """The run that manages a model in this process now."""
    return _current


def open_manager() -> _C.Manager | None:
    """What manages tensors in this process now: of a run, or of a model that is being made under its budget."""
    if _current is not None:
        return _current._manager
    return _growing.manager if _growing is not None else None


@contextlib.contextmanager
def resident(*tensors: torch.Tensor) -> Iterator[None]:
    """Keeps the tensors' data on the device inside the context, for code that takes raw pointers (`numpy()`,
    `data_ptr()`, dlpack). Unmanaged tensors are left as they are.

    Raises RuntimeError where they do not fit the budget together.
    """
    manager = open_manager()
    pinned: list[torch.Tensor] = []
    try:
        if manager is not None:
            for tensor in tensors:
                manager.pin(tensor)
                pinned.append(tensor)
        yield
    finally:
        if manager is not None and manager.is_open():
            for tensor in pinned:
                manager.unpin(tensor)


class _Pending:
    """What a module's deferred step needs: the gradients of the moment of `step()` and the options of that moment."""

    __slots__ = ("gradients", "groups", "scaling", "actions")

    def __init__(self) -> None:
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        # (optimizer, [(options, parameters)])
        self.groups: list[tuple[Optimizer, list[tuple[dict[str, Any], list[torch.Tensor]]]]] = []
        # What a GradScaler told a fused optimizer for this step, by the optimizer's id.
        self.scaling: dict[int, dict[str, torch.Tensor]] = {}
        # Called after the optimizer's step, in order.
        self.actions: list[Any] = []


class Run:
    """A managed run. Made by `misa.manage`; use it as a context manager around the training loop."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        budget: int,
        elastic: bool,
        least: int,
        weight: float,
        mode: str,
        step: str,
        daemon: str,
        job: str | None,
        sampled: Sampled | None,
        runtime_dir: str | None,
        disk: str | None,
        chunk_bytes: int,
        emulated: Emulated | None,
        stress: bool,
        demand_only: bool,
        wait_seconds: float,
        tasks: Tasks,
        pin: Sequence[str] = (),
        made: Growing | None = None,
    ) -> None:
        self.mode = mode
        self._tasks = tasks
        self._loss = StepLoss()
        self._last_budget = budget
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._manager: _C.Manager | None = None
        self._report: dict[str, Any] | None = None
        self._steps_before = 0  # of the runs that this one resumes
        self._pending: dict[int, _Pending] = {}
        self._stepping_threads: set[int] = set()
        # Parameters that came later: those not managed, and all that the manager itself does not hold, kept alive.
        self._left_alone: set[int] = set()
        self._keep: list[torch.Tensor] = []
        # Parameters that have stepped in the backward since their optimizer's last step().
        self._stepped_early: set[int] = set()
        self._steps = 0
        self._step_mode = step
        for optimizer in self._optimizers:
            self._check_optimizer(optimizer, step)
            # Unknown but separable ones are stepped inside step(), module by module.
        if any(not is_known(optimizer) for optimizer in self._optimizers):
            if step != "eager":
                names = ", ".join(sorted({type(o).__name__ for o in self._optimizers if not is_known(o)}))
                print(f"misa: {names} is not one of the optimizers known to step later unchanged; its steps run inside "
                      "step(), module by module.", file=sys.stderr)
            self._step_mode = "eager"

        named = _named_parameters(self._models)
        seen = {id(parameter) for _, parameter in named}
        owners = {id(p): (o, g) for o in self._optimizers for g in o.param_groups for p in g["params"]}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        raise ValueError(
                            f"{type(optimizer).__name__} trains a tensor of shape {tuple(parameter.shape)} that is in "
                            "none of the models given to misa.manage: give it all models. Nothing was changed."
                        )
        # In the manager's order; None where one has left.
        self._parameters: list[torch.Tensor | None] = [p for _, p in named]
        self._place = {id(p): i for i, p in enumerate(self._parameters)}
        parameters = [
            (
                name,
                p,
                expected_state_bytes(*owners[id(p)], p) if id(p) in owners else 0,
                step_bytes(*owners[id(p)], p) if id(p) in owners else 0,
            )
            for name, p in named
        ]
        existing_state = any(state_tensors(o, g["params"]) for o in self._optimizers for g in o.param_groups)
        self._sampling: SamplingDriver | None = None
        if mode == "sampled":
            # Made before anything is moved, so that impossible options change nothing.
            self._sampling = SamplingDriver(named, self._optimizers, sampled or Sampled())
        _check_pins(named, pin)
        _torch_save.install()
        if made is not None:
            # The model was made under its budget: the same session goes on.
            made.manager.set_pins(list(pin))
            made.manager.take(parameters=parameters, step=self._step_mode, existing_state=existing_state)
            self._manager = made.manager
        else:
            self._manager = make_manager(
                parameters,
                budget=(least, budget, elastic),
                weight=weight,
                mode=mode,
                step=self._step_mode,
                daemon=daemon,
                job=job,
                sampled=sampled,
                runtime_dir=runtime_dir,
                disk=disk,
                chunk_bytes=chunk_bytes,
                emulated=emulated,
                stress=stress,
                demand_only=demand_only,
                wait_seconds=wait_seconds,
                existing_state=existing_state,
                pins=list(pin),
            )
        by_name = dict(named)
        self._modules = self._manager.modules()
        self._module_parameters = [[by_name[n] for n in module["parameters"]] for module in self._modules]
        self._module_of = {id(p): i for i, ps in enumerate(self._module_parameters) for p in ps}
        self._manager.set_stepper(self._run_step)
        self._manager.set_gradient_complete(self._gradient_complete)
        if self._sampling is not None:
            self._sampling.begin()
            self._publish_sampling()
        self._manager.watch_gradients()
        if existing_state:
            for module in range(len(self._modules)):
                self._manager.adopt_existing(module)
            self._manager.finish_adoption()
        self._patch_optimizers()
        self._timeline = Timeline()
        self._timeline.__enter__()
        self._clip = by_module(self)
        self._clip.__enter__()
        self._doors = Doors(self._manager)
        self._doors.open()
        self._members = Members(self)
        self._members.open()
        take_over(self._tasks)

    @staticmethod
    def _check_optimizer(optimizer: Optimizer, step: str) -> None:
        if not is_separable(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} is not known to step each parameter by itself, so its step would need all "
                "its memory at once: it cannot be managed. If each parameter's step depends on that parameter alone, say "
                "so with a class attribute misa_separable = True. Nothing was changed."
            )
        if optimizer.__dict__.get("step") is not None and not hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            raise ValueError(
                f"The step of this {type(optimizer).__name__} has been replaced on the object; misa cannot take it apart. "
                "Nothing was changed."
            )
        for group in optimizer.param_groups:
            if step != "eager" and (group.get("differentiable") or group.get("capturable")):
                raise ValueError(
                    f"{type(optimizer).__name__} with differentiable or capturable cannot be deferred: use step=\"eager\" "
                    "or turn it off. Nothing was changed."
                )

    # ------------------------------------------------------------------------------------------------ stepping

    def _patch_optimizers(self) -> None:
        self._originals: list[tuple[Optimizer, Any]] = []
        self._zero_grads: list[tuple[Optimizer, Any]] = []
        self._hook_handles: list[Any] = []
        for optimizer in self._optimizers:
            self._originals.append((optimizer, optimizer.__dict__.get("step")))

            def step(this: Optimizer, closure: Any = None) -> Any:
                return self._step(this, closure)

            bound = types.MethodType(step, optimizer)
            optimizer.step = bound  # type: ignore[method-assign]
            # Learning-rate schedulers look for these marks to see that step() came before scheduler.step().
            optimizer.step.__func__._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
            self._watch_state(optimizer)
            self._zero_grads.append((optimizer, optimizer.__dict__.get("zero_grad")))
            optimizer.zero_grad = types.MethodType(self._zero_grad, optimizer)  # type: ignore[method-assign]
            self._hook_handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.flush()))
            # What is loaded replaces the state after the steps before, and is managed from then on.
            self._hook_handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.flush()))
            self._hook_handles.append(optimizer.register_load_state_dict_post_hook(self._adopt_loaded_state))

    def _watch_state(self, optimizer: Optimizer) -> None:
        """Whoever reads the optimizer's state sees the steps that were due done: counters in it are no tensors of ours."""
        optimizer.state = WatchedState(optimizer.state, self._look_at_state)  # type: ignore[assignment]

    def _look_at_state(self, parameter: Any) -> None:
        if self._manager is None or threading.get_ident() in self._stepping_threads:
            return  # the optimizer itself
        if parameter is WatchedState.ALL:
            self.flush()
        elif (module := self._module_of.get(id(parameter))) is not None and self._manager.is_pending(module):
            self._manager.step_module(module)

    def _unpatch_optimizers(self) -> None:
        for optimizer, original in self._originals:
            if original is None:
                optimizer.__dict__.pop("step", None)
            else:
                optimizer.step = original  # type: ignore[method-assign]
        for optimizer in self._optimizers:
            optimizer.state = WatchedState.plain(optimizer.state)  # type: ignore[assignment]
        for optimizer, original in self._zero_grads:
            if original is None:
                optimizer.__dict__.pop("zero_grad", None)
            else:
                optimizer.zero_grad = original  # type: ignore[method-assign]
        for handle in self._hook_handles:
            handle.remove()
        self._originals = []
        self._zero_grads = []
        self._hook_handles = []

    @staticmethod
    def _zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
        # torch's own with foreach hands every gradient to one operator, so all would have to fit at once.
        if set_to_none:
            type(optimizer).zero_grad(optimizer, set_to_none=True)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter.grad.grad_fn is not None:
                        parameter.grad.detach_()
                    else:
                        parameter.grad.requires_grad_(False)
                    parameter.grad.zero_()

    def _adopt_loaded_state(self, optimizer: Optimizer) -> None:
        assert self._manager is not None
        _torch_save.own_small_tensors(optimizer.state)
        self._watch_state(optimizer)
        for module in range(len(self._modules)):
            self._manager.adopt_loaded(module)

    def _refuse_second_gradient(self, parameter: torch.Tensor) -> None:
        name = self._modules[self._module_of[id(parameter)]]["name"]
        raise RuntimeError(
            f"A second gradient came for {name} before step(), but with step=\"in_backward\" it has stepped with the first "
            "already, so this step is not the one of plain training. Use step=\"deferred\" for gradient accumulation, several "
            "backward() calls before a step(), and weights shared between reentrant checkpoints."
        )

    def refuse_early(self, what: str) -> None:
        """Raises where modules have stepped in the backward already, so that `what` would come too late."""
        if self._stepped_early:
            raise RuntimeError(
                f"It is too late to {what}: with step=\"in_backward\" the modules have stepped during backward(), and their "
                "gradients are gone. Use step=\"deferred\", which gives the same bits and allows everything between "
                "backward() and step()."
            )

    def _step(self, optimizer: Optimizer, closure: Any) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for hook in (*_global_hooks("_global_optimizer_pre_hooks"), *optimizer._optimizer_step_pre_hooks.values()):
            result = hook(optimizer, (), {})
            if result is not None:
                raise RuntimeError(
                    "A step pre-hook of the optimizer returned new arguments, which a step taken apart by module cannot "
                    "honour. Nothing was changed by this step()."
                )
        optimizer._opt_called = True  # type: ignore[attr-defined]
        # With several optimizers the boundary is the last one's step.
        boundary = optimizer is self._optimizers[-1]
        manager = self._manager
        assert manager is not None
        stats = manager.take_statistics() if boundary else []
        if self._step_mode == "in_backward":
            mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._place]
            for parameter in mine:
                if parameter.grad is not None and id(parameter) in self._stepped_early:
                    self._refuse_second_gradient(parameter)
            manager.settle([self._place[id(p)] for p in mine])
            self._stepped_early.difference_update(map(id, mine))
        self._members.at_step(optimizer)
        due: dict[int, list[tuple[dict[str, Any], list[torch.Tensor]]]] = {}
        unmanaged: list[tuple[dict[str, Any], torch.Tensor]] = []
        scaling = snapshot_scaling(optimizer)
        for group in optimizer.param_groups:
            options: dict[str, Any] | None = None
            parts: dict[int, list[torch.Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if id(parameter) not in self._module_of:
                    unmanaged.append((group, parameter))
                    continue
                parts.setdefault(self._module_of[id(parameter)], []).append(parameter)
            for module, parameters in parts.items():
                if options is None:
                    options = snapshot_group(group)
                due.setdefault(module, []).append((options, parameters))
        for module, groups in due.items():
            if module in self._pending and self._pending[module].groups:
                # A second step() before the first was looked at.
                manager.step_module(module)
            pending = self._pending.setdefault(module, _Pending())
            pending.groups.append((optimizer, groups))
            pending.scaling[id(optimizer)] = scaling
            pending.gradients.extend((p, p.grad) for _, ps in groups for p in ps)
            if self._step_mode == "deferred":
                # As if it had stepped: a backward over a graph of before has to fail, as it does in plain training.
                torch.autograd.graph.increment_version([p for _, ps in groups for p in ps])
            manager.mark_pending(module)
            if not all(manager.is_managed(p.grad) for _, ps in groups for p in ps):
                # Whoever changes such a gradient in place (zeroing, DistributedDataParallel's buckets) is not seen: the step
                # must not come after that.
                manager.step_module(module)
        for group, parameter in unmanaged:
            self._raw_step(optimizer, [({k: v for k, v in group.items() if k != "params"}, [parameter])], scaling)
        if self._step_mode != "deferred":
            manager.flush()
        for hook in (*optimizer._optimizer_step_post_hooks.values(), *_global_hooks("_global_optimizer_post_hooks")):
            hook(optimizer, (), {})
        if boundary:
            self._steps += 1
            task = self._tasks.end_step()
            manager.set_task(*task)
            told, rows = self._loss.take()
            if told is not None:
                manager.set_loss(told, rows)
            micro_batches = max(1, manager.take_micro_batches())
            if self._sampling is not None:
                self._sampling.end_step([(m, s, q, n) for m, s, q, n in stats], self._defer, told, micro_batches, task)
                self._publish_sampling()
            self._members.at_boundary()
            # Parameters may have been thawed.
            manager.watch_gradients()
            manager.end_step()
            self._doors.look_around()
        return loss

    def _defer(self, module: int, action: Any) -> None:
        """Runs `action` on the module once everything that is due before has run."""
        self._pending.setdefault(module, _Pending()).actions.append(action)
        assert self._manager is not None
        self._manager.mark_pending(module)
        if self._step_mode != "deferred":
            self._manager.step_module(module)

    @staticmethod
    def _raw_step(optimizer: Optimizer, groups: list[tuple[dict[str, Any], list[torch.Tensor]]],
                  scaling: dict[str, torch.Tensor]) -> None:
        """The optimizer's own step for these parameters alone, with the options of the moment of `step()`."""
        kept = optimizer.param_groups
        now = snapshot_scaling(optimizer, cloned=False)
        optimizer.param_groups = [{**options, "params": parameters} for options, parameters in groups]
        optimizer.__dict__.update(scaling)
        try:
            with _plain_context():
                raw_step(optimizer)()
        finally:
            optimizer.param_groups = kept
            for name in scaling:
                del optimizer.__dict__[name]
            optimizer.__dict__.update(now)

    def adopt(self) -> list[str]:
        """Takes over the parameters that have come to the models since `misa.manage`, those that no optimizer trains as well.
        What an optimizer of the run is given (`add_param_group`) comes by itself, at its next `step()`.

        Returns the names of those that are managed now and were not before.
        """
        if not self.is_managing():
            raise RuntimeError("This run has ended: there is nothing that could take parameters over.")
        return self._members.adopt()

    def _run_step(self, module: int) -> list[torch.Tensor]:
        """What is due for one module; called with its facets present. Returns its optimizer state."""
        outermost = threading.get_ident() not in self._stepping_threads
        self._stepping_threads.add(threading.get_ident())
        try:
            return self._run_step_now(module)
        finally:
            if outermost:
                self._stepping_threads.discard(threading.get_ident())

    def _run_step_now(self, module: int) -> list[torch.Tensor]:
        pending = self._pending.get(module)
        parameters = self._module_parameters[module]
        if pending is not None:
            grad_mode = torch.is_grad_enabled()
            current = [(p, p.grad) for p, _ in pending.gradients]
            try:
                for parameter, gradient in pending.gradients:
                    if parameter.grad is not gradient:
                        parameter.grad = gradient
                for optimizer, groups in pending.groups:
                    self._raw_step(optimizer, groups, pending.scaling.get(id(optimizer), {}))
            finally:
                for parameter, gradient in current:
                    if parameter.grad is not gradient:
                        parameter.grad = gradient
                torch.set_grad_enabled(grad_mode)
                # Done or failed half-way: never twice.
                self._pending.pop(module, None)
            with _plain_context():
                for action in pending.actions:
                    action()
        tensors: list[torch.Tensor] = []
        for optimizer in self._optimizers:
            tensors.extend(state_tensors(optimizer, parameters))
        return tensors

    def _gradient_complete(self, module: int) -> None:
        """In-backward stepping: the module's gradients are there, so it steps and they go."""
        pending = self._pending.setdefault(module, _Pending())
        parts: dict[int, tuple[Optimizer, list[tuple[dict[str, Any], list[torch.Tensor]]]]] = {}
        assert self._manager is not None
        # A gradient of before may still be there, where zero_grad() has not come yet.
        fresh = {id(self._parameters[i]) for i in self._manager.fresh_parameters(module)}
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                mine = [p for p in group["params"] if id(p) in fresh and p.grad is not None]
                if mine:
                    parts.setdefault(id(optimizer), (optimizer, []))[1].append((snapshot_group(group), mine))
        pending.groups.extend(parts.values())
        stepped = [p for _, groups in parts.values() for _, ps in groups for p in ps]
        for parameter in stepped:
            if id(parameter) in self._stepped_early:
                pending.groups = []
                self._refuse_second_gradient(parameter)
        self._stepped_early.update(map(id, stepped))
        pending.gradients.extend((p, p.grad) for p in stepped)
        gradients = [p for p, _ in pending.gradients]
        for parameter in gradients:
            parameter.grad = None
        self._manager.step_module(module)

    def _publish_sampling(self) -> None:
        assert self._sampling is not None and self._manager is not None
        self._manager.set_sampling(self._sampling.round, self._sampling.active_modules, self._sampling.digest,
                                   self._sampling.counted_steps, self._sampling.waited)

    def is_managing(self) -> bool:
        """The run has not ended."""
        return self._manager is not None and self._report is None

    def steps_for(self, optimizer: Optimizer) -> bool:
        """The run takes this optimizer's steps apart."""
        return self.is_managing() and any(optimizer is one for one in self._optimizers)

    def load_optimizer_state(self, optimizer: Optimizer, read: Callable[[torch.Tensor], dict[str, Any] | None]) -> None:
        """Gives each parameter the state that `read` has for it, module by module; it goes behind the pool before the next
        module's is read. What the optimizer had before is gone already."""
        assert self._manager is not None
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for module, parameters in enumerate(self._module_parameters):
            for parameter in parameters:
                state = read(parameter) if id(parameter) in mine else None
                if state is not None:
                    optimizer.state[parameter] = state
                del state
            self._manager.adopt_loaded(module)
        if self._steps == 0:
            self._manager.reset_trace()

    @property
    def steps(self) -> int:
        """Training steps done, those of the runs before included that this one resumes."""
        return self._steps_before + self._steps

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the states of model and optimizer: the steps done and, in mode "sampled", the
        sampler with its importance, its generator and its place in the round. Steps that are due are done first."""
        self.flush()
        state: dict[str, Any] = {"schema": "misa.run/1", "mode": self.mode, "steps": self.steps}
        if self._sampling is not None:
            state["sampling"] = self._sampling.state_dict()
        if tasks := self._tasks.state():
            state["tasks"] = tasks
        return state

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError where `load_state_dict` would."""
        if not self.is_managing():
            raise ValueError("This run has ended: there is nothing to resume in it.")
        if not isinstance(state, dict) or state.get("schema") != "misa.run/1":
            raise ValueError("This is not the state of a run (run.state_dict() gives one). Nothing was changed.")
        if state.get("mode") != self.mode:
            raise ValueError(
                f"The state is of a run in mode {state.get('mode')!r}, and this one is in mode {self.mode!r}. Nothing was changed."
            )
        if self._sampling is not None:
            self._sampling.check_state_dict(state.get("sampling"))
        self._tasks.check_state(state.get("tasks", []))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where the run that gave this state was.

        Raises ValueError where it is of another mode, other options or another model; nothing was changed then.
        """
        self.check_state_dict(state)
        assert self._manager is not None
        self.flush()
        if self._sampling is not None:
            self._sampling.load_state_dict(state.get("sampling"))
            self._publish_sampling()
            self._manager.watch_gradients()
            self._manager.resume_sampler(self._sampling.serialized())
        self._tasks.load_state(state.get("tasks", []))
        self._steps_before = int(state["steps"]) - self._steps

    def step_loss(self, loss: torch.Tensor | float, rows: int = 0) -> None:
        """Tells the guards the loss of the step that is under way, before `optimizer.step()`; of several micro-batches each
        one's, and their mean counts. It changes no result, unless `Sampled.wait_for_stable_loss` waits for it.

        `rows` of the batch, of each micro-batch where there are several: the report and misactl then hint how many would fit.
        """
        self._loss.add(loss, rows)

    def flush(self) -> None:
        """Runs every step that is still due, so that code which reads the optimizer's Python side sees all of it."""
        if self._manager is not None:
            self._manager.flush()

    # ------------------------------------------------------------------------------------------------- looking

    @property
    def budget_bytes(self) -> int:
        """What this trainer may hold on the device now. The daemon changes an elastic budget at step boundaries."""
        if self._manager is not None:
            self._last_budget = self._manager.session()["budget_bytes"]
        return self._last_budget

    @property
    def models(self) -> list[torch.nn.Module]:
        """The models that are managed; none once the run has ended."""
        return self._models

    def modules(self) -> list[dict[str, Any]]:
        """Name, kind, parameters and parameter count of every module."""
        return [module for module in self._modules if module["parameters"]]

    def session(self) -> dict[str, Any]:
        """The session's id, budget, device and daemon."""
        assert self._manager is not None
        return self._manager.session()

    def states(self) -> list[tuple[str, str]]:
        """Every facet's name and residency now."""
        assert self._manager is not None
        return self._manager.states()

    def daemon_alive(self) -> bool:
        return self._manager is not None and self._manager.daemon_alive()

    def unload_all(self) -> bool:
        """Unloads everything that is not in use now. Training goes on as before; for tests and measurements."""
        assert self._manager is not None
        return self._manager.unload_all()

    def report(self) -> dict[str, Any]:
        """What the run did so far: bytes, seconds, bounds. Medians are over all steps but the first three, where there are
        more than six."""
        if self._report is not None:
            return self._report
        return self._make_report()

    def _make_report(self) -> dict[str, Any]:
        assert self._manager is not None
        totals = self._manager.totals()
        session = self._manager.session()

        def settled(values: list[Any]) -> list[Any]:
            return values[3:] if len(values) > 6 else values

        def median(values: list[Any]) -> float:
            return statistics.median(settled(values)) if values else 0.0

        return {
            "mode": self.mode,
            "step_mode": self._step_mode,
            "budget_bytes": self.budget_bytes,
            "steps": self._steps,
            "tasks": self._tasks.report(),
            "step_seconds_median": median(totals["step_seconds"]),
            "stall_seconds_median": median(totals["stall_seconds"]),
            # Computed as the daemon's and misactl's: runtime/policy/step_bound.h.
            "bound_step_seconds": totals["bound_step_seconds"],
            "h2d_bytes_per_step": median(totals["loaded_bytes"]),
            "d2h_bytes_per_step": median(totals["unloaded_bytes"]),
            "bound_link_seconds": totals["bound_link_seconds"],
            "bound_h2d_bytes_per_step": totals["bound_load_bytes"],
            "bound_d2h_bytes_per_step": totals["bound_unload_bytes"],
            "device_peak_bytes": _C.peak_bytes(),
            "device_stddev_bytes": self._timeline.stddev_bytes,
            "demand_loads": totals["demand_loads"],
            "prefetch_loads": totals["prefetch_loads"],
            "prefetch_hits": totals["prefetch_hits"],
            "unloads": totals["unloads"],
            "drops": totals["drops"],
            "departures": totals["departures"],
            "plan_version": totals["plan_version"],
            "predicted_step_seconds": totals["predicted_step_seconds"],
            # How many rows a batch could have: beside all that is on the device now, and at most. None: not known.
            "batch": None if not totals["batch_known"] else {
                "rows": totals["batch_rows"] or None,
                "free_share": totals["batch_free_share"],
                "most_share": totals["batch_most_share"],
                "free_rows": totals["batch_free_rows"] if totals["batch_rows"] else None,
                "most_rows": totals["batch_most_rows"] if totals["batch_rows"] else None,
                "hint": totals["batch_hint"],
            },
            "module_count": len(self.modules()),
            "parameter_count": totals["parameter_count"],
            "weights_bytes": totals["weights_bytes"],
            "gradients_bytes": totals["gradients_bytes"],
            "optimizer_bytes": totals["optimizer_bytes"],
            "notices": totals["notices"],
            "step_seconds": totals["step_seconds"],
            "stall_seconds": totals["stall_seconds"],
            "loaded_bytes": totals["loaded_bytes"],
            "unloaded_bytes": totals["unloaded_bytes"],
            "device": {
                "kind": session["device_kind"],
                "name": session["device_name"],
                "capacity_bytes": session["device_capacity_bytes"],
                "h2d_bytes_per_second": totals["load_bytes_per_second"],
                "d2h_bytes_per_second": totals["unload_bytes_per_second"],
                "duplex_h2d_bytes_per_second": totals["duplex_load_bytes_per_second"],
                "duplex_d2h_bytes_per_second": totals["duplex_unload_bytes_per_second"],
                "total_bytes_per_second": totals["duplex_load_bytes_per_second"]
                + totals["duplex_unload_bytes_per_second"],
                # Of a modelled link: by how much its copies came later than the model says, in all.
                "late_seconds": totals["link_late_seconds"],
            },
            "timeline": self._timeline.samples,
        }

    # ------------------------------------------------------------------------------------------------------ end

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self, keep_managed: bool | None = None) -> None:
        """Ends the management: what is due is done, and every tensor gets memory of its own again where all of it fits the
        budget. Where it does not, everything stays managed and is loaded on demand until the process ends, or until
        `release()`.

        `keep_managed` decides instead of the budget: False gives the memory back whatever it takes.
        """
        global _current
        if self._manager is None:
            return
        if self._report is None:
            self._timeline.__exit__(None, None, None)
            self._clip.__exit__(None, None, None)
            self._doors.close()
            self._members.close()
            try:
                # Without a budget to keep, what is due needs no room: it is done when the memory is given back.
                if keep_managed is not False:
                    self._manager.flush()
            finally:
                let_go(self._tasks)
                if self._sampling is not None:
                    self._sampling.end()
                self._report = self._make_report()
                self._unpatch_optimizers()
        if keep_managed is False:
            try:
                self._manager.release_all()
            finally:
                if not self._manager.is_open():
                    self._manager = None
                    _current = None
                    self._let_go()
            return
        if keep_managed or not self._manager.release():
            print("misa: the model and its optimizer state do not fit the budget together; they stay managed and are "
                  "loaded on demand until the process ends or release() is called.", file=sys.stderr)
            # Nothing steps any more; once nobody else holds the model, its memory is free.
            self._manager.let_go()
            self._let_go()
            return
        self._manager = None
        _current = None
        self._let_go()

    def _let_go(self) -> None:
        """An ended run is its report: it keeps no model alive."""
        self._models, self._module_parameters, self._module_of = [], [], {}
        self._parameters, self._place, self._keep = [], {}, []
        self._optimizers, self._sampling, self._pending = [], None, {}

    def release(self) -> None:
        """Gives every tensor memory of its own again, whatever it takes, and ends the session."""
        self.close(keep_managed=False)


def step_bound(report: dict[str, Any], compute_seconds: float) -> float:
    """The least seconds of a step of this run (its `report()`) where its compute is known from elsewhere: the step of plain
    training on the same machine, say."""
    device = report["device"]
    return _C.measured_step_bound(
        compute_seconds=compute_seconds,
        load_bytes=report["bound_h2d_bytes_per_step"],
        unload_bytes=report["bound_d2h_bytes_per_step"],
        load_bytes_per_second=device["h2d_bytes_per_second"],
        unload_bytes_per_second=device["d2h_bytes_per_second"],
        duplex_load_bytes_per_second=device["duplex_h2d_bytes_per_second"],
        duplex_unload_bytes_per_second=device["duplex_d2h_bytes_per_second"],
    )


def _check_pins(named: Sequence[tuple[str, torch.Tensor]], pins: Sequence[str]) -> None:
    """Raises ValueError for a pin that no module goes by."""
    if isinstance(pins, str):
        raise ValueError(f"pin={pins!r} must be a list of kinds or names of modules, such as [{pins!r}]. Nothing was changed.")
    groups = _C.group_parameters(list(named)) if pins else []
    for pin in pins:
        if not any(_C.is_pinned(name, kind, [pin]) for name, kind, _, _ in groups):
            kinds = sorted({_C.pin_kind(name, kind) for name, kind, _, _ in groups} | {kind for _, kind, _, _ in groups})
            raise ValueError(f"pin has {pin!r} in it, which is neither a module's name nor a kind; the kinds here are "
                             f"{', '.join(kinds)}. Nothing was changed.")


def _named_parameters(models: Sequence[torch.nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Every parameter once, under the first of its names; the models are told apart where there are several."""
    named: dict[int, tuple[str, torch.Tensor]] = {}
    for number, model in enumerate(models):
        prefix = f"model{number}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            named.setdefault(id(parameter), (prefix + name, parameter))
    return list(named.values())


def _global_hooks(name: str) -> list[Any]:
    # torch.optim hides its own submodule of this name.
    return list(getattr(sys.modules["torch.optim.optimizer"], name, {}).values())


@contextlib.contextmanager
def _plain_context() -> Iterator[None]:
    """Runs a deferred step as if it stood where the user called step(): no autograd, no autocast, no inference mode of the
    operator whose touch it precedes."""
    with _C.plain_dispatch(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        yield


def make_manager(
    parameters: list[tuple[str, torch.Tensor, int, int]] | None,
    *,
    budget: Budget,
    weight: float = 1.0,
    mode: str,
    step: str = "deferred",
    daemon: str,
    job: str | None,
    sampled: Sampled | None,
    runtime_dir: str | None,
    disk: str | None,
    chunk_bytes: int,
    emulated: Emulated | None = None,
    stress: bool,
    demand_only: bool,
    wait_seconds: float,
    existing_state: bool = False,
    pins: Sequence[str] = (),
) -> _C.Manager:
    """A session, and what manages tensors in it: these parameters, or (None) those of a model that is still to be made."""
    least, most, elastic = budget
    manager = _C.Manager(
        parameters=parameters,
        budget=most,
        elastic=elastic,
        least=least,
        weight=weight,
        mode=mode,
        step=step,
        daemon=daemon,
        job=job or Path(sys.argv[0] or "python").name or "python",
        runtime_directory=runtime_dir or "",
        disk_directory=disk or "",
        daemon_binary=binary("misad"),
        chunk_bytes=chunk_bytes,
        sampling=(sampled or Sampled()).options() if mode == "sampled" else _C.SamplerOptions(),
        stress=stress,
        demand_only=demand_only,
        wait_seconds=wait_seconds,
        existing_state=existing_state,
        emulated=emulated.for_daemon() if emulated is not None else None,
        pins=list(pins),
    )
    if manager.session()["private_daemon"] and daemon == "auto":
        print("misa: no daemon runs on this node; a private one was started for this trainer.", file=sys.stderr)
    return manager


def manage(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    budget: str | int | tuple[str | int, str | int] | None = None,
    weight: float = 1.0,
    mode: str = "exact",
    step: str = "deferred",
    daemon: str = "auto",
    job: str | None = None,
    sampled: Sampled | None = None,
    tasks: Mapping[str, float] | None = None,
    pin: Sequence[str] = (),
    runtime_dir: str | None = None,
    disk: str | None = None,
    chunk_bytes: int = 0,
    device: str | Emulated | None = None,
    stress: bool = False,
    demand_only: bool = False,
    wait_seconds: float = 120.0,
) -> Run:
    """Gives the memory of a model's training state to misa; the training loop stays as it is.

    Args:
        model: the model, or all models whose parameters the optimizers train.
        optimizer: the optimizer, or all of them; a training step ends with the last one's `step()`.
        budget: bytes on the device that this trainer may hold at once, managed state and every other tensor
            ("24GiB", "800MiB" or a number). "auto", or a range such as ("2GiB", "24GiB"): the daemon chooses, and changes
            it at step boundaries as other trainers come and go; every budget gives the same bits. A model made in
            `misa.empty_init` has one already.
        weight: how much this trainer counts beside others where the daemon chooses budgets.
        mode: "exact" (bit-identical to plain training) or "sampled" (module-wise importance sampling, bit-identical to
            `misa.SampledReference` with the same options).
        step: "deferred" (each module steps at its next touch), "in_backward" (as soon as its gradient is complete;
            nothing may happen between `backward()` and `step()`), "eager" (inside `step()`). All give the same bits.
        daemon: "auto" (the node's misad, else a private one), "required" (the node's or an error), "private".
        job: a name for people; default: the program's.
        sampled: options of mode "sampled".
        tasks: names and weights of the training's tasks (`misa.task`), so that any other name is an error; default: whichever the
            loop names.
        pin: kinds or names of modules ("embedding", "expert", "norm", …) that stay on the device as far as the budget allows;
            without it bytes and time alone decide. See docs/guards.md.
        runtime_dir: where misad's sockets are; default $MISA_RUNTIME_DIR or /run/misa.
        disk: directory of a private daemon's disk tier; default $MISA_DISK_DIR or /var/tmp.
        chunk_bytes: chunk size of a private daemon; 0 for its default.
        device: what a private daemon's device is: "cpu" (the default), "emulated:rtx-3090" or another twin, or a
            `misa.Emulated`. An emulated device is always a private daemon's; see docs/emulated.md.
        stress: keep nothing on the device that need not be there. For tests.
        demand_only: load on demand alone, and let go what was used longest ago. For measurements.
        wait_seconds: when no byte has moved for so long, a wait ends with an error.

    Raises:
        ValueError: an option or optimizer that cannot work, or a budget that is no number of bytes; nothing was changed.
        RuntimeError: a budget too small for the model (the sentence names one that is not, as later ones do when a step meets
            the limit), no daemon, no room in its pool or on the disk; nothing was changed.
    """
    global _current, _growing
    check_choices(mode=mode, step=step, daemon=daemon)
    end_unused()
    if _current is not None:
        raise ValueError(
            "misa already manages a model in this process: give all models and optimizers to one misa.manage(...)."
        )
    if budget is None:
        if _growing is None:
            raise ValueError("misa.manage needs a budget, such as budget=\"24GiB\". Nothing was changed.")
        least_bytes, budget_bytes, elastic = _growing.budget
    else:
        least_bytes, budget_bytes, elastic = budget_range(budget)
    check_weight(weight)
    named_tasks = Tasks(tasks)
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    if not models or not optimizers:
        raise ValueError("misa.manage needs at least one model and one optimizer.")
    if step == "in_backward" and world_size() > 1:
        raise ValueError(
            f"torch.distributed runs {world_size()} processes, and step=\"in_backward\" would step with this process's gradients "
            "before they are averaged with the others': use step=\"deferred\", which gives plain training's bits. Nothing was "
            "changed."
        )
    for one in models:
        refuse_sharded(one)
    models = [unwrap_model(one) for one in models]
    optimizers = [unwrap_optimizer(one) for one in optimizers]
    emulated = parse(device)
    if emulated is not None:
        if daemon == "required":
            raise ValueError("An emulated device is a private daemon's, and daemon=\"required\" asks for the node's: give the "
                             "node's misad `device: {kind: emulated, …}` in its configuration instead, or leave daemon out.")
        daemon = "private"
        emulated = with_compute(emulated, models)
    made = _growing
    if made is not None:
        if emulated is not None:
            raise ValueError("This model was made in misa.empty_init, whose device cannot become an emulated one: give "
                             "device= where the model is made in the ordinary way. Nothing was changed.")
        made.check(budget=(least_bytes, budget_bytes, elastic), mode=mode, sampled=sampled)
    run = Run(
        models,
        optimizers,
        budget=budget_bytes,
        elastic=elastic,
        least=least_bytes,
        weight=float(weight),
        mode=mode,
        step=step,
        daemon=daemon,
        job=job,
        sampled=sampled,
        runtime_dir=runtime_dir,
        disk=disk,
        chunk_bytes=chunk_bytes,
        emulated=emulated,
        stress=stress,
        demand_only=demand_only,
        wait_seconds=wait_seconds,
        tasks=named_tasks,
        pin=tuple(pin) if not isinstance(pin, str) else pin,
        made=made,
    )
    _growing = None
    _current = run
    return run


def check_choices(**choices: str) -> None:
    """Raises ValueError for a mode, a step or a daemon that there is not."""
    for name, allowed in (("mode", _MODES), ("step", _STEPS), ("daemon", _DAEMONS)):
        if name in choices and choices[name] not in allowed:
            raise ValueError(f"{name} is {choices[name]!r}, but must be one of {', '.join(allowed)}.")


def check_weight(weight: float) -> float:
    if not 0 < weight <= 1000:
        raise ValueError(f"A weight of {weight!r} makes no sense: it lies above 0 and up to 1000.")
    return float(weight)


def end_unused() -> None:
    """Ends what manages tensors that nobody holds any more: an ended run whose model did not fit the budget, a model that was
    made under a budget and dropped."""
    global _growing
    if _current is not None and _current._report is not None and _current._manager is not None:
        if not any(residency != "empty" for _, residency in _current._manager.states()):
            _current.release()
    if _growing is not None and _current is None and _growing.end_if_unused():
        _growing = None


def parse_budget(budget: str | int) -> int:
    """Bytes of a budget as people write it."""
    bytes_ = _C.parse_byte_size(budget) if isinstance(budget, str) else int(budget)
    if bytes_ <= 0:
        raise ValueError(f"A budget of {budget!r} holds nothing: it must be above 0 bytes.")
    return bytes_


def budget_range(budget: str | int | tuple[str | int, str | int]) -> Budget:
    """A budget as people write it."""
    if budget == "auto":
        return 0, 0, True
    if isinstance(budget, (tuple, list)):
        if len(budget) != 2:
            raise ValueError(f"A budget of {budget!r} is neither a size nor a range of two sizes.")
        least, most = (budget_range(part)[1] for part in budget)
        if most and least > most:
            raise ValueError(f"A budget between {budget[0]!r} and {budget[1]!r} is no range.")
        return least, most, True
    return 0, parse_budget(budget), False


def _in_child() -> None:
    # The run, its threads and its lease are the parent's.
    global _current, _growing
    _current = _growing = None


os.register_at_fork(after_in_child=_in_child)


@atexit.register
def _at_exit() -> None:
    # A clean word to the daemon; the memory itself goes with the process.
    manager = open_manager()
    if manager is not None:
        manager.close_session()
