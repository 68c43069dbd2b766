"""Checkpoints on disk: `misa.save`, `misa.load`, `misa.load_weights`. One tensor in memory at a time.

A checkpoint is a folder:

    checkpoint.json               schema, and size and CRC-32 of every other file
    model.safetensors             or model-00001-of-….safetensors with model.safetensors.index.json
    optimizer.safetensors         likewise; tensors are named PARAMETER.STATE
    state.pt                      the rest, small: options of the optimizers, generators, schedulers, misa's own state

It is written aside, brought to the disk, and given its name in one step, so that the name is always that of a whole one.
"""

from __future__ import annotations

import ctypes
import errno
import io
import json
import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
from torch.optim import Optimizer

from . import _manage
from ._safetensors import Reader, check_dtype, crc32_of, write, write_bytes

SCHEMA = "misa.checkpoint/1"
_MANIFEST = "checkpoint.json"
_STATE = "state.pt"
_TENSOR = "misa.tensor"  # key of what stands in for a tensor in state.pt
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

Path_ = str | os.PathLike[str]


def _as_list(value: Any, kind: type, what: str) -> list[Any]:
    items = [] if value is None else [value] if isinstance(value, kind) else list(value)
    for item in items:
        if not isinstance(item, kind):
            raise TypeError(f"{what} is a {type(item).__name__}, but must be a {kind.__name__} or several. Nothing was changed.")
    return items


def _stem(kind: str, number: int, count: int) -> str:
    return kind if count == 1 else f"{kind}{number}"


# ------------------------------------------------------------------------------------------------------------- models


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _split_state(model: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a model's state, and what is none (extra state)."""
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    for name, value in model.state_dict().items():
        (tensors if isinstance(value, torch.Tensor) else extra)[name] = value
    return tensors, extra


def _save_model(folder: Path, stem: str, model: torch.nn.Module, shard_bytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors, extra = _split_state(model)
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        kept = first.setdefault(_key(tensor), name) if tensor.numel() else name
        if kept != name:
            aliases[name] = kept  # tied: one owner, as the format asks
    files = write(folder, stem, ((n, t) for n, t in tensors.items() if n not in aliases), shard_bytes, aliases)
    return files, extra


def _check_model(reader: Reader, model: torch.nn.Module, strict: bool, where: str) -> dict[str, torch.Tensor]:
    """The model's tensors that the files have, by name. Raises where they do not belong together."""
    tensors, _ = _split_state(model)
    present = {_key(tensor) for name, tensor in tensors.items() if name in reader}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name not in reader:
            if strict and _key(tensor) not in present:
                raise ValueError(f"{where} has no {name}, which the model has. Nothing was changed.")
            continue
        dtype, shape = reader.kind(name)
        if (dtype, shape) != (tensor.dtype, tuple(tensor.shape)):
            raise ValueError(
                f"{name} is {dtype} of shape {shape} in {where}, and {tensor.dtype} of shape {tuple(tensor.shape)} in the "
                "model. Nothing was changed."
            )
        wanted[name] = tensor
    if strict:
        unknown = [name for name in reader.names() if name not in tensors]
        if unknown:
            raise ValueError(f"{where} has {unknown[0]}, which the model does not have. Nothing was changed.")
    return wanted


def _load_model(reader: Reader, model: torch.nn.Module, wanted: Mapping[str, torch.Tensor]) -> None:
    own = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    copies: dict[str, torch.Tensor] = {}
    done: set[tuple[Any, ...]] = set()
    for name, tensor in wanted.items():
        if tensor.untyped_storage()._cdata not in own:
            copies[name] = reader.tensor(name)  # the model's hooks made a copy for the state: they take it back, too
        elif _key(tensor) not in done:
            done.add(_key(tensor))
            reader.copy_to(name, tensor)
    if copies:
        model.load_state_dict(copies, strict=False)


def load_weights(model: torch.nn.Module, path: Path_, *, strict: bool = True) -> None:
    """Reads a model's parameters and buffers from safetensors files, one tensor at a time, managed or not.

    Args:
        model: the model, whole or one that `misa.empty_init` has made.
        path: a safetensors file, an index of several (`model.safetensors.index.json`), or the folder they are in.
        strict: every parameter and persistent buffer has to be in the files, and nothing else.

    Raises:
        FileNotFoundError, ValueError: files that are missing, damaged or of another model; nothing was changed.
    """
    with Reader(path) as reader:
        wanted = _check_model(reader, model, strict, str(path))
        _flush()
        _load_model(reader, model, wanted)


# --------------------------------------------------------------------------------------------------------- optimizers


def _parameter_names(optimizer: Optimizer, models: Sequence[torch.nn.Module]) -> list[str]:
    """A name for every parameter in the order of the groups, as `state_dict` counts them."""
    known: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = f"model{number}." if len(models) > 1 else ""
        for name, parameter in model.named_parameters():
            known.setdefault(id(parameter), prefix + name)
    names: list[str] = []
    used: set[str] = set()
    for number, group in enumerate(optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            name = known.get(id(parameter), f"group{number}.{place}")
            names.append(name if name not in used else f"{name}#{len(names)}")
            used.add(names[-1])
    return names


def _take_out(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` with a note in place of every tensor, which goes to `tensors`."""
    if isinstance(value, torch.Tensor):
        check_dtype(name, value)
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, dict):
        return {key: _take_out(inner, f"{name}.{key}", tensors) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_take_out(inner, f"{name}.{place}", tensors) for place, inner in enumerate(value))
    return value


def _put_back(value: Any, reader: Reader) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return reader.tensor(value[_TENSOR])
        return {key: _put_back(inner, reader) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_put_back(inner, reader) for inner in value)
    return value


def _tensor_notes(value: Any) -> list[str]:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return [value[_TENSOR]]
        return [name for inner in value.values() for name in _tensor_notes(inner)]
    if isinstance(value, (list, tuple)):
        return [name for inner in value for name in _tensor_notes(inner)]
    return []


def _save_optimizer(
    folder: Path, stem: str, optimizer: Optimizer, models: Sequence[torch.nn.Module], shard_bytes: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    packed = optimizer.state_dict()
    names = _parameter_names(optimizer, models)
    tensors: dict[str, torch.Tensor] = {}
    state: dict[Any, Any] = {}
    for key, value in packed["state"].items():
        state[key] = _take_out(value, names[key] if isinstance(key, int) and key < len(names) else f"state.{key}", tensors)
    files = write(folder, stem, tensors.items(), shard_bytes)
    groups = [{**group, "params": list(group["params"])} for group in packed["param_groups"]]
    rest = {key: value for key, value in packed.items() if key not in ("state", "param_groups")}
    return files, {"class": type(optimizer).__name__, "names": names, "state": state, "param_groups": groups, "rest": rest}


def _check_optimizer(reader: Reader, optimizer: Optimizer, saved: Mapping[str, Any], models: Sequence[torch.nn.Module],
                     where: str) -> None:
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"{where} is of {saved['class']}, and the optimizer is {type(optimizer).__name__}. Nothing was changed.")
    here = [len(group["params"]) for group in optimizer.param_groups]
    there = [len(group["params"]) for group in saved["param_groups"]]
    if here != there:
        raise ValueError(
            f"{where} has groups of {there} parameters, and the optimizer has groups of {here}. Nothing was changed."
        )
    names = _parameter_names(optimizer, models)
    if models and names != saved["names"]:
        place = next(i for i, (a, b) in enumerate(zip(names, saved["names"])) if a != b)
        raise ValueError(
            f"Parameter {place} is {saved['names'][place]} in {where}, and {names[place]} in the optimizer. Nothing was changed."
        )
    for name in _tensor_notes(saved["state"]):
        if name not in reader:
            raise ValueError(f"{where} has no {name}, which its state.pt speaks of. Nothing was changed.")


def _load_optimizer(reader: Reader, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    groups = saved["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    run = _manage.current_run()
    if run is None or not run.steps_for(optimizer):
        optimizer.load_state_dict({**saved["rest"], "state": _put_back(saved["state"], reader), "param_groups": groups})
        return
    # The options first, and the old state gone; then each module's state is read, and behind the pool before the next.
    loose = {key: value for key, value in saved["state"].items() if not isinstance(key, int) or key >= len(parameters)}
    optimizer.load_state_dict({**saved["rest"], "state": loose, "param_groups": groups})
    by_parameter = {id(p): saved["state"][i] for i, p in enumerate(parameters) if i in saved["state"]}
    run.load_optimizer_state(optimizer, lambda p: _put_back(by_parameter[id(p)], reader) if id(p) in by_parameter else None)


# ---------------------------------------------------------------------------------------------------------- the rest


def _generators() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, place, has_gauss, gauss = sys.modules["numpy"].random.get_state()
        state["numpy"] = [kind, torch.tensor([int(k) for k in keys]), int(place), int(has_gauss), float(gauss)]
    return state


def _set_generators(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        kind, keys, place, has_gauss, gauss = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys.tolist(), dtype=numpy.uint32), place, has_gauss, gauss))


def _pack_state(state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = buffer.getvalue()
    try:
        torch.load(io.BytesIO(data), weights_only=True)
    except Exception as error:
        raise ValueError(
            "Something in `others`, in the optimizer's options or in a module's extra state is more than numbers, text, tensors "
            f"and lists and dicts of them, and would not be loaded again ({str(error).splitlines()[0][:200]}). Nothing was written."
        ) from None
    return data


def _flush() -> None:
    run = _manage.current_run()
    if run is not None:
        run.flush()


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the filesystem cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    if libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    if ctypes.get_errno() in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(other))


def _put_in_place(aside: Path, path: Path) -> None:
    if not path.exists():
        os.rename(aside, path)
    elif _exchange(aside, path):
        shutil.rmtree(aside)  # the earlier one by now
    else:
        before = aside.with_name(aside.name + ".before")
        os.rename(path, before)
        os.rename(aside, path)
        shutil.rmtree(before)
    _sync_folder(path.parent)


def save(
    path: Path_,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    others: Mapping[str, Any] | None = None,
    generators: bool = True,
    shard_bytes: str | int = "4GiB",
) -> None:
    """Saves a training in a folder, within the budget: one tensor is in memory at a time.

    What is saved is what the same training without misa would have at this place: steps that are due are done first.
    Gradients are not saved, so call it between two steps. Model and optimizer may be managed or not.

    Args:
        path: the folder. A checkpoint that is there is replaced in one step once the new one is on the disk.
        model: one or several.
        optimizer: one or several.
        others: what else the training needs, by names of your choice: objects with a `state_dict` (schedulers, a GradScaler)
            or plain values (an epoch).
        generators: also saves the states of the generators of torch, of `random` and, where it is imported, of numpy.
        shard_bytes: a model or optimizer state larger than this goes to several files.

    Raises:
        ValueError: something that cannot be saved, or `path` is something else than a checkpoint; nothing was written.
        OSError: the disk does not take it; what was at `path` before is still there.
    """
    models = _as_list(model, torch.nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    if not models and not optimizers and not others:
        raise ValueError("misa.save was given neither model nor optimizer nor others: there is nothing to save.")
    most = _manage.parse_budget(shard_bytes)
    path = Path(path).absolute()
    if path.exists() and not (path.is_dir() and ((path / _MANIFEST).is_file() or not any(path.iterdir()))):
        raise ValueError(f"{path} is there and is not a checkpoint of misa.save: it was not replaced. Choose another path.")
    _flush()
    run = _manage.current_run()
    naming = models or (run.models if run is not None else [])
    state: dict[str, Any] = {
        "models": [],
        "optimizers": [],
        "others": {k: v.state_dict() if hasattr(v, "state_dict") else v for k, v in (others or {}).items()},
        "run": run.state_dict() if run is not None and run.is_managing() else None,
    }
    if generators:
        state["generators"] = _generators()
    _pack_state(state)  # refused before anything is written
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        files: dict[str, dict[str, int]] = {}
        for number, one in enumerate(models):
            written, extra = _save_model(aside, _stem("model", number, len(models)), one, most)
            files.update(written)
            state["models"].append({"extra": extra})
        for number, one in enumerate(optimizers):
            written, rest = _save_optimizer(aside, _stem("optimizer", number, len(optimizers)), one, naming, most)
            files.update(written)
            state["optimizers"].append(rest)
        files[_STATE] = write_bytes(aside / _STATE, _pack_state(state))
        manifest = {"schema": SCHEMA, "torch": torch.__version__, "files": files}
        write_bytes(aside / _MANIFEST, json.dumps(manifest, indent=2).encode() + b"\n")
        _sync_folder(aside)
        _put_in_place(aside, path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _verify(path: Path, contents: bool) -> None:
    try:
        manifest = json.loads((path / _MANIFEST).read_bytes())
        schema, files = manifest["schema"], dict(manifest["files"])
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is not a checkpoint of misa.save: it has no {_MANIFEST}. For bare safetensors files there is "
            "misa.load_weights. Nothing was changed."
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path / _MANIFEST} is damaged ({error!r}). Nothing was changed.") from None
    if schema != SCHEMA:
        raise ValueError(f"{path} is a checkpoint of the form {schema!r}, and this misa reads {SCHEMA!r}. Nothing was changed.")
    for name, entry in files.items():
        try:
            found = crc32_of(path / name) if contents else ((path / name).stat().st_size, entry["crc32"])
        except OSError as error:
            raise ValueError(f"{path / name} cannot be read ({error.strerror}). Nothing was changed.") from None
        if found != (entry["bytes"], entry["crc32"]):
            raise ValueError(
                f"{path / name} is damaged: it does not have the content it was written with. Use an earlier checkpoint. "
                "Nothing was changed."
            )


def load(
    path: Path_,
    *,
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    others: Mapping[str, Any] | None = None,
    generators: bool = True,
    verify: bool = True,
) -> dict[str, Any]:
    """Loads what `misa.save` saved, within the budget: one tensor is in memory at a time.

    With model and optimizer managed, call it inside `misa.manage`: the run then goes on where the saved one was, to the bit,
    in mode "sampled" in the middle of a round as well. Everything is checked before anything is changed.

    Args:
        path: the folder.
        model, optimizer: what the saved ones are loaded into; as many as were saved, or none to leave them out.
        others: objects that take their saved state with `load_state_dict`, by the names they were saved under.
        generators: also sets the generators that were saved.
        verify: reads all files once before, and compares their CRC-32.

    Returns:
        The other things that were saved, by name: the states of those objects, and the plain values.

    Raises:
        FileNotFoundError, ValueError: no checkpoint, a damaged one, or one of another training; nothing was changed.
    """
    path = Path(path).absolute()
    models = _as_list(model, torch.nn.Module, "model")
    optimizers = _as_list(optimizer, Optimizer, "optimizer")
    _verify(path, contents=verify)
    try:
        state = torch.load(path / _STATE, weights_only=True, mmap=False)
        counts = len(state["models"]), len(state["optimizers"])
        saved_others, saved_run = state["others"], state["run"]
    except Exception as error:
        raise ValueError(f"{path / _STATE} is damaged ({str(error).splitlines()[0]}). Nothing was changed.") from None
    for what, given, saved in (("models", models, counts[0]), ("optimizers", optimizers, counts[1])):
        if given and len(given) != saved:
            raise ValueError(f"{path} holds {saved} {what}, and {len(given)} were given. Nothing was changed.")
    for name, thing in (others or {}).items():
        if name not in saved_others:
            raise ValueError(f"{path} has nothing saved under the name {name!r}. Nothing was changed.")
        if not hasattr(thing, "load_state_dict"):
            raise ValueError(f"others[{name!r}] has no load_state_dict; take its value from what misa.load returns. Nothing was "
                             "changed.")
    run = _manage.current_run()
    managed = run is not None and run.is_managing() and optimizers
    if optimizers and saved_run is not None and saved_run["mode"] == "sampled" and not managed:
        raise ValueError(
            f"{path} was saved in mode \"sampled\": call misa.load inside misa.manage(..., mode=\"sampled\"), so that the draws go "
            "on where they were. Nothing was changed."
        )
    if managed:
        assert run is not None
        if saved_run is not None:
            run.check_state_dict(saved_run)
        elif run.mode == "sampled":
            raise ValueError(f"{path} was saved outside misa.manage, so it has no state of draws to go on with in mode "
                             "\"sampled\". Nothing was changed.")
    readers: list[Reader] = []
    try:
        to_do: list[Any] = []
        for number, one in enumerate(models):
            reader = Reader(path, _stem("model", number, counts[0]))
            readers.append(reader)
            wanted = _check_model(reader, one, True, str(path))
            to_do.append(lambda r=reader, m=one, w=wanted: _load_model(r, m, w))
            extra = state["models"][number]["extra"]
            if extra:
                to_do.append(lambda m=one, e=extra: m.load_state_dict(e, strict=False))
        for number, one in enumerate(optimizers):
            reader = Reader(path, _stem("optimizer", number, counts[1]))
            readers.append(reader)
            saved = state["optimizers"][number]
            _check_optimizer(reader, one, saved, models or (run.models if run is not None else []), str(path))
            to_do.append(lambda r=reader, o=one, s=saved: _load_optimizer(r, o, s))
        _flush()
        for action in to_do:
            action()
    finally:
        for reader in readers:
            reader.close()
    if managed and saved_run is not None:
        assert run is not None
        run.load_state_dict(saved_run)
    for name, thing in (others or {}).items():
        thing.load_state_dict(saved_others[name])
    if generators and "generators" in state:
        _set_generators(state["generators"])
    return dict(saved_others)
