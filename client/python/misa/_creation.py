"""Models made directly under a budget: `misa.empty_init`, `misa.from_safetensors`."""

from __future__ import annotations

import os
import weakref
from types import TracebackType
from typing import Any, Callable, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from . import _C, _manage, _torch_save
from ._checkpoint import load_weights
from ._sampling import Sampled

M = TypeVar("M", bound=torch.nn.Module)

# Parameters below the first wait for one another up to the second, so that each does not take whole chunks of its own; under
# small budgets less.
_SMALL_BYTES = 1 << 20
_BATCH_BYTES = 4 << 20


def _as_written(budget: _manage.Budget) -> int | str | tuple[int, int | str]:
    least, most, elastic = budget
    if not elastic:
        return most
    return (least, most or "auto") if least or most else "auto"


class Growing:
    """A session, and the parameters that went behind its pool; `misa.manage` takes it over."""

    def __init__(self, manager: _C.Manager, budget: _manage.Budget, mode: str, sampled: Sampled | None) -> None:
        self.manager = manager
        self.budget = budget
        budget_bytes = manager.session()["budget_bytes"]
        self._mode = mode
        self._sampled = sampled
        # Weakly: what was replaced meanwhile need not go anywhere.
        self._waiting: list[weakref.ref[torch.Tensor]] = []
        self._waiting_bytes = 0
        self._small_bytes = min(_SMALL_BYTES, budget_bytes // 64)
        self._batch_bytes = min(_BATCH_BYTES, budget_bytes // 16)

    def check(self, *, budget: _manage.Budget, mode: str, sampled: Sampled | None) -> None:
        """Raises where a run asks for something else than what the model was made under."""
        theirs = self._sampled or Sampled()
        for name, value, here in (
            ("budget", _as_written(budget), _as_written(self.budget)),
            ("mode", mode, self._mode),
            ("sampled", (sampled or Sampled()) if mode == "sampled" else None, theirs if mode == "sampled" else None),
        ):
            if value != here:
                raise ValueError(
                    f"misa.empty_init was given {name}={here!r}, and misa.manage is given {name}={value!r}: give both the "
                    "same. Nothing was changed."
                )

    def made(self, tensor: Any) -> None:
        """A parameter was made. A large one goes behind the pool at once, before it is filled."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return
        if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
            return  # a lazy module's; it is made in the first forward
        size = tensor.untyped_storage().nbytes()
        if size >= self._small_bytes:
            self.manager.adopt_created([tensor])
            return
        self._waiting.append(weakref.ref(tensor))
        self._waiting_bytes += size
        if self._waiting_bytes >= self._batch_bytes:
            self.settle()

    def settle(self) -> None:
        """What waits goes behind the pool."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        self.manager.adopt_created([tensor for tensor in (reference() for reference in waiting) if tensor is not None])

    def end_if_unused(self) -> bool:
        """Ends the session where nobody holds any of its tensors any more."""
        if any(residency != "empty" for _, residency in self.manager.states()):
            return False
        self.manager.release_all()
        return True


class empty_init:  # noqa: N801: used as a context, like torch.no_grad
    """Inside this context models are made under a budget, however large they are.

        with misa.empty_init(budget="24GiB"):
            model = Model(config)
        optimizer = torch.optim.AdamW(model.parameters())
        with misa.manage(model, optimizer):
            ...

    A parameter goes behind misa's pool as it is made, so no more of the model than the budget is in memory at any time.
    The constructors' code runs unchanged and draws from the same generators in the same order: with the same seed the
    weights are bit-identical to those made without misa. Buffers stay in ordinary memory.

    Args:
        budget, weight, mode, sampled, daemon, job, runtime_dir, disk, chunk_bytes, stress, demand_only, wait_seconds: as for
            `misa.manage`, which takes the model over with what is given here.

    Raises:
        ValueError: an option that cannot work, or a model is managed in this process already.
        RuntimeError: no daemon, no room in its pool or on the disk. An operator that does not fit the budget raises torch's
            error with a sentence; what was made until then is safe.
    """

    def __init__(
        self,
        *,
        budget: str | int | tuple[str | int, str | int],
        weight: float = 1.0,
        mode: str = "exact",
        sampled: Sampled | None = None,
        daemon: str = "auto",
        job: str | None = None,
        runtime_dir: str | None = None,
        disk: str | None = None,
        chunk_bytes: int = 0,
        stress: bool = False,
        demand_only: bool = False,
        wait_seconds: float = 120.0,
    ) -> None:
        _manage.check_choices(mode=mode, daemon=daemon)
        self._budget = _manage.budget_range(budget)
        self._mode = mode
        self._sampled = sampled
        self._options: dict[str, Any] = {
            "weight": _manage.check_weight(weight),
            "mode": mode,
            "daemon": daemon,
            "job": job,
            "sampled": sampled,
            "runtime_dir": runtime_dir,
            "disk": disk,
            "chunk_bytes": chunk_bytes,
            "stress": stress,
            "demand_only": demand_only,
            "wait_seconds": wait_seconds,
        }

    def __enter__(self) -> empty_init:
        _manage.end_unused()
        if _manage.open_manager() is not None:
            raise ValueError(
                "misa already manages a model in this process: make all models inside one misa.empty_init, before "
                "misa.manage. Nothing was changed."
            )
        manager = _manage.make_manager(None, budget=self._budget, **self._options)
        _torch_save.install()
        growing = Growing(manager, self._budget, self._mode, self._sampled)
        _manage._growing = growing
        self._growing = growing
        self._hook = register_module_parameter_registration_hook(lambda module, name, parameter: growing.made(parameter))
        # Layers that are copies of another (torch.nn.Transformer's) come by here.
        self._deepcopy = torch.nn.Parameter.__deepcopy__

        def deepcopy(parameter: torch.nn.Parameter, memo: dict[int, Any]) -> Any:
            copied = self._deepcopy(parameter, memo)
            growing.made(copied)
            return copied

        torch.nn.Parameter.__deepcopy__ = deepcopy  # type: ignore[method-assign]
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._hook.remove()
        torch.nn.Parameter.__deepcopy__ = self._deepcopy  # type: ignore[method-assign]
        if kind is None:
            self._growing.settle()
        else:
            self._growing._waiting = []


def from_safetensors(
    factory: Callable[[], M], path: str | os.PathLike[str], *, strict: bool = True, **options: Any
) -> M:
    """Makes a model under a budget and reads its weights from safetensors files, one tensor at a time.

    Args:
        factory: makes the model.
        path: a safetensors file, an index of several (`model.safetensors.index.json`), or the folder they are in.
        strict: every parameter and persistent buffer has to be in the files, and nothing else.
        **options: as for `misa.empty_init`; left out where a budget is in force already.
    """
    if options:
        with empty_init(**options):
            model = factory()
    else:
        model = factory()
    load_weights(model, path, strict=strict)
    return model
