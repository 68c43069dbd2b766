"""Ways to a tensor's data that are no operators: what is known of them is told to the manager beforehand.

All of them would work without this, since an access to data that is away waits in the fault door until it is there. Told
beforehand, what cannot be had (a disk that fails, a budget that is too small) is an exception here and not the end of the
process, data is there for system calls too, and what a compiled graph uses is loaded together and planned for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import sys
from typing import Any, Callable, Iterator

import torch

from . import _C

_TENSOR_DOORS = ("data_ptr", "numpy", "tolist", "__dlpack__", "share_memory_")
_STORAGE_DOORS = ("tolist", "__getitem__", "_write_file", "_share_fd_cpu_", "_share_filename_cpu_")


class Doors:
    """The doors of one run; open between `open` and `close`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._put_back = contextlib.ExitStack()
        self._inductor = False

    def open(self) -> None:
        for name in _TENSOR_DOORS:
            self._replace(torch.Tensor, name, functools.partial(_looking, self._manager.look))
        for name in _STORAGE_DOORS:
            self._replace(torch.UntypedStorage, name, functools.partial(_looking, self._manager.look_at_storage))
        self._replace(torch._C, "_to_dlpack", functools.partial(_looking, self._manager.look))
        if hasattr(torch._C, "_to_dlpack_versioned"):
            self._replace(torch._C, "_to_dlpack_versioned", functools.partial(_looking, self._manager.look))
        self._replace(torch.utils.dlpack, "to_dlpack", functools.partial(_looking, self._manager.look))
        # Its handler must come after the fault door's, which hands on what is not its own.
        self._replace(faulthandler, "enable", _keeping_fault_door)
        self._replace(torch.cuda.CUDAGraph, "capture_begin", _refusing_graphs)
        self.look_around()

    def look_around(self) -> None:
        """Finds what was imported since the last call; called at step boundaries."""
        if self._inductor or self._manager is None:
            return
        module = sys.modules.get("torch._inductor.output_code")
        graph = getattr(module, "CompiledFxGraph", None)
        if graph is None:
            return
        self._inductor = True
        self._replace(graph, "__call__", functools.partial(_pinning, self._manager.pin_together))

    def close(self) -> None:
        self._put_back.close()
        self._manager = None  # which holds the run, and the run these doors

    def _replace(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        own = name in vars(owner)
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        self._put_back.callback(setattr, owner, name, original) if own else self._put_back.callback(delattr, owner, name)


def _looking(look: Callable[[Any], None], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def looked(first: Any, *arguments: Any, **options: Any) -> Any:
        look(first)
        return original(first, *arguments, **options)

    return looked


def _pinning(pin: Callable[[list[Any]], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def pinned(graph: Any, inputs: Any) -> Any:
        held = pin(list(inputs))
        try:
            return original(graph, inputs)
        finally:
            held.end()

    return pinned


def _keeping_fault_door(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def enable(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        _C.keep_fault_door()
        return result

    return enable


def _refusing_graphs(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refused(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "A CUDA graph replays kernels without asking for their data, and misa manages memory on the cpu device here, which "
            "graphs cannot hold resident: nothing was captured. Capture it before misa.manage(...) or without misa, or "
            "leave the graph out (torch.compile(mode=\"default\"))."
        )

    return refused
