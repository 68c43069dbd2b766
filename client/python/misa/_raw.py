"""Raw bytes of tensors, managed or not: present while they are looked at, one tensor at a time."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any, Iterator

import torch

from . import _manage


@contextlib.contextmanager
def held(storage: torch.UntypedStorage, write: bool = False) -> Iterator[None]:
    """Keeps a managed storage on the device inside the context, without a mark in the trace of the training."""
    manager = _manage.open_manager()
    if manager is None or storage.device.type != "cpu":
        yield
        return
    manager.hold(storage, write)
    try:
        yield
    finally:
        manager.let_go_of(storage)


def _flat(tensor: torch.Tensor) -> memoryview:
    # Not by way of numpy(): torch marks a storage for good that an array was made over, and misa would not take it over then.
    if not tensor.numel():
        return memoryview(bytearray())
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


@contextlib.contextmanager
def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The tensor's elements in row-major order. Valid inside the context only."""
    with torch.no_grad(), held(tensor.untyped_storage()):
        data = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        view = _flat(data)
        try:
            yield view
        finally:
            view.release()
            del data


def copy_in(tensor: torch.Tensor, read: Any) -> None:
    """Fills the tensor with what `read(memoryview)` puts into the view given to it."""
    with torch.no_grad(), held(tensor.untyped_storage(), write=True):
        target = tensor.detach()
        if target.device.type == "cpu" and target.is_contiguous() and not target.is_conj() and not target.is_neg():
            view = _flat(target)
            try:
                read(view)
            finally:
                view.release()
            # The write was behind autograd's back.
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)
        else:
            data = torch.empty(tensor.shape, dtype=tensor.dtype)
            view = _flat(data)
            try:
                read(view)
            finally:
                view.release()
            target.copy_(data)
