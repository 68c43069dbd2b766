"""`torch.save` and `torch.load` of managed tensors: storage by storage, within the budget.

torch asks every storage for its address while it pickles, and hands one after the other to the file's writer. So the
address is told without loading anything, and each storage is on the device only while its own bytes are written.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
from typing import Any

import torch
from torch import serialization

from . import _C, _manage
from ._raw import held

_saving = threading.local()
# Files that loaded tensors were mapped from, by device and inode. The number can have become another file's when nothing is
# mapped from it any more; then a file is replaced that could have been written over, which costs nothing.
_mapped: set[tuple[int, int]] = set()
_installed = False


class _Writer:
    """torch's file writer, with every storage held while its bytes are written."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def write_record(self, name: str, data: Any, size: int) -> Any:
        if not torch.is_storage(data):
            return self._inner.write_record(name, data, size)
        with held(data):
            return self._inner.write_record(name, data, size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _is_path(file: Any) -> bool:
    return isinstance(file, (str, os.PathLike))


def _identity(path: Any) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def install() -> None:
    """Opens the doors, once in a process; where nothing is managed they let everything through."""
    global _installed
    if _installed:
        return
    _installed = True

    save, open_writer, load = serialization._save, serialization._open_zipfile_writer, torch.load
    data_ptr = torch.UntypedStorage.data_ptr

    @functools.wraps(data_ptr)
    def address(self: torch.UntypedStorage) -> int:
        manager = getattr(_saving, "manager", None)
        return (manager.address_of(self) if manager is not None else 0) or data_ptr(self)

    @functools.wraps(save)
    def save_held(obj: Any, zip_file: Any, *arguments: Any, **options: Any) -> Any:
        manager = _manage.open_manager()
        if manager is None:
            return save(obj, zip_file, *arguments, **options)
        before = getattr(_saving, "manager", None)
        _saving.manager = manager
        try:
            return save(obj, _Writer(zip_file), *arguments, **options)
        finally:
            _saving.manager = before

    @functools.wraps(open_writer)
    def open_writer_aside(file: Any) -> Any:
        # Writing over a file that tensors are mapped from would change them, or end the process at their next use. Its
        # name goes to a new file instead; the old one lives as long as they do.
        if _is_path(file) and _identity(file) in _mapped:
            os.unlink(file)
        return open_writer(file)

    @functools.wraps(load)
    def load_within_budget(f: Any, map_location: Any = None, pickle_module: Any = None, *, mmap: bool | None = None,
                           **options: Any) -> Any:
        manager = _manage.open_manager()
        if manager is None or mmap is not None or not _is_path(f):
            return load(f, map_location, pickle_module, mmap=mmap, **options)
        identity = _identity(f)
        budget = manager.session()["budget_bytes"]
        if identity is None or _C.other_bytes() + os.path.getsize(f) <= budget // 2 or not _is_zip(f):
            return load(f, map_location, pickle_module, mmap=mmap, **options)
        # It would not fit beside the model: its pages stay in the file until they are read.
        _mapped.add(identity)
        return load(f, map_location, pickle_module, mmap=True, **options)

    torch.UntypedStorage.data_ptr = address  # type: ignore[method-assign]
    serialization._save = save_held
    serialization._open_zipfile_writer = open_writer_aside
    torch.load = serialization.load = load_within_budget  # type: ignore[assignment]


def _is_zip(path: Any) -> bool:
    with open(path, "rb") as file:
        return bool(serialization._is_zipfile(file))


def own_small_tensors(state: Any) -> None:
    """Gives small tensors of optimizer state that lie in a mapped file memory of their own: they stay as they are while the
    others move to the pool, and the file is not theirs to keep."""
    if not _mapped:
        return
    for parameter_state in state.values():
        if not isinstance(parameter_state, dict):
            continue
        for key, value in parameter_state.items():
            if isinstance(value, torch.Tensor) and value.numel() * value.element_size() < 4096:
                parameter_state[key] = value.clone()
