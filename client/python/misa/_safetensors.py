"""Files in the safetensors format (https://github.com/huggingface/safetensors), written and read one tensor at a time.

The format is a length (8 bytes, little endian), a JSON header and the tensors' bytes, so that no more than one tensor has
to be in memory. Models larger than a file should be lie in several, with the index that Hugging Face's libraries use.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import torch

from ._raw import bytes_of, copy_in

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PIECE_BYTES = 8 << 20
# What was written is sent to the disk this often, so that it does not pile up in the page cache.
_SYNC_BYTES = 32 << 20
_MOST_HEADER_BYTES = 100 << 20  # the format's own limit


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"{name} is of {tensor.dtype}, which the safetensors format does not have. Nothing was written.")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is not a dense tensor, and the safetensors format has no others. Nothing was written.")


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _Writer:
    """A file whose bytes are counted and summed, and leave the page cache as they come."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._synced = 0
        self.bytes = 0
        self.crc32 = 0

    def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        for start in range(0, len(view), _PIECE_BYTES):
            piece = view[start : start + _PIECE_BYTES]
            self.crc32 = zlib.crc32(piece, self.crc32)
            while len(piece):
                piece = piece[os.write(self._fd, piece) :]
            self.bytes += min(_PIECE_BYTES, len(view) - start)
            if self.bytes - self._synced >= _SYNC_BYTES:
                self._sync()

    def _sync(self) -> None:
        os.fdatasync(self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._synced = self.bytes

    def close(self) -> None:
        if self._fd >= 0:
            try:
                os.fsync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_bytes(path: Path, data: bytes) -> dict[str, int]:
    """Writes a small file; returns its size and CRC-32."""
    with _Writer(path) as out:
        out.write(data)
    return {"bytes": out.bytes, "crc32": out.crc32}


def _write_shard(path: Path, tensors: Sequence[tuple[str, torch.Tensor]], metadata: Mapping[str, str]) -> dict[str, int]:
    # Wide elements first: then each tensor's bytes begin at a multiple of its element's size.
    tensors = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for name, tensor in tensors:
        end = offset + tensor_bytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with _Writer(path) as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for _, tensor in tensors:
            with bytes_of(tensor) as data:
                out.write(data)
    return {"bytes": out.bytes, "crc32": out.crc32}


def write(
    folder: Path, stem: str, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int, metadata: Mapping[str, str] = {}
) -> dict[str, dict[str, int]]:
    """Writes `stem`.safetensors, or several of them and their index where one would be larger than `shard_bytes`. Returns
    each file's size and CRC-32 by its name."""
    shards: list[list[tuple[str, torch.Tensor]]] = [[]]
    filled = 0
    total = 0
    for name, tensor in tensors:
        check_dtype(name, tensor)
        size = tensor_bytes(tensor)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, tensor))
        filled += size
        total += size
    if len(shards) == 1:
        name = f"{stem}.safetensors"
        return {name: _write_shard(folder / name, shards[0], metadata)}
    files: dict[str, dict[str, int]] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        name = f"{stem}-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        files[name] = _write_shard(folder / name, shard, metadata)
        weight_map.update((tensor_name, name) for tensor_name, _ in shard)
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": dict(sorted(weight_map.items()))}
    name = f"{stem}.safetensors.index.json"
    files[name] = write_bytes(folder / name, json.dumps(index, indent=2).encode() + b"\n")
    return files


class _Shard:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise FileNotFoundError(f"{path} cannot be read ({error.strerror}). Nothing was changed.") from None
        try:
            self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _damaged(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is not a whole safetensors file: {what}. Nothing was changed.")

    def _read_header(self) -> None:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, 8, 0), "little") if size >= 8 else -1
        if length < 2 or length > min(_MOST_HEADER_BYTES, size - 8):
            raise self._damaged(f"it has {size} bytes and no header in them")
        try:
            header = json.loads(os.pread(self._fd, length, 8))
            self.metadata = dict(header.pop("__metadata__", {}))
            self.tensors: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]] = {}
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if entry["dtype"] not in _DTYPES:
                    raise self._damaged(f"{name} is of the unknown type {entry['dtype']!r}")
                dtype = _DTYPES[entry["dtype"]]
                if not all(isinstance(n, int) and n >= 0 for n in (begin, end, *shape)):
                    raise self._damaged(f"the place of {name} is not made of whole numbers")
                if end - begin != math.prod(shape) * dtype.itemsize:
                    raise self._damaged(f"{name} has another size than its shape says")
                self.tensors[name] = (dtype, shape, begin, end)
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            if "Nothing was changed" in str(error):
                raise
            raise self._damaged(f"its header cannot be read ({error})") from None
        place = 0
        for name, (_, _, begin, end) in sorted(self.tensors.items(), key=lambda item: item[1][2:]):
            if begin != place:
                raise self._damaged(f"{name} does not begin where the tensor before it ends")
            place = end
        if 8 + length + place != size:
            raise self._damaged(f"it has {size} bytes, and its header speaks of {8 + length + place}")
        self._data = 8 + length

    def read(self, name: str, view: memoryview) -> None:
        _, _, begin, end = self.tensors[name]
        offset = self._data + begin
        while len(view):
            got = os.preadv(self._fd, [view[:_PIECE_BYTES]], offset)
            if got == 0:
                raise OSError(f"{self.path} became shorter while {name} was read from it.")
            view = view[got:]
            offset += got
        os.posix_fadvise(self._fd, self._data + begin, end - begin, os.POSIX_FADV_DONTNEED)


class Reader:
    """The tensors of one safetensors file, of several with their index, or of the folder they are in."""

    def __init__(self, path: str | os.PathLike[str], stem: str = "model") -> None:
        self._shards: list[_Shard] = []
        self._place: dict[str, _Shard] = {}
        self.path = Path(path)
        try:
            self._open(self.path, stem)
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, stem: str) -> None:
        if path.is_dir():
            index, single = path / f"{stem}.safetensors.index.json", path / f"{stem}.safetensors"
            if not index.is_file() and not single.is_file():
                raise FileNotFoundError(f"{path} holds neither {single.name} nor {index.name}. Nothing was changed.")
            path = index if index.is_file() else single
        if path.suffix != ".json":
            self._add(path, None)
            return
        try:
            weight_map = json.loads(path.read_bytes())["weight_map"]
            files = {str(name): str(file) for name, file in weight_map.items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is not an index of safetensors files ({error!r}). Nothing was changed.") from None
        for file in dict.fromkeys(files.values()):
            if Path(file).name != file:
                raise ValueError(f"{path} names the file {file!r} outside its own folder. Nothing was changed.")
            self._add(path.parent / file, {name for name, where in files.items() if where == file})

    def _add(self, path: Path, expected: set[str] | None) -> None:
        shard = _Shard(path)
        self._shards.append(shard)
        if expected is not None and expected - set(shard.tensors):
            raise ValueError(
                f"{path} lacks {sorted(expected - set(shard.tensors))[0]}, which its index says it holds. Nothing was changed."
            )
        self._place.update((name, shard) for name in shard.tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._place

    def names(self) -> list[str]:
        return list(self._place)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Element type and shape."""
        dtype, shape, _, _ = self._place[name].tensors[name]
        return dtype, shape

    def copy_to(self, name: str, tensor: torch.Tensor) -> None:
        """Fills a tensor of the same type and shape."""
        copy_in(tensor, lambda view: self._place[name].read(name, view))

    def tensor(self, name: str) -> torch.Tensor:
        """A new tensor."""
        dtype, shape = self.kind(name)
        made = torch.empty(shape, dtype=dtype)
        self.copy_to(name, made)
        return made

    def close(self) -> None:
        for shard in self._shards:
            shard.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def crc32_of(path: Path) -> tuple[int, int]:
    """Size and CRC-32 of a file."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = crc = 0
        buffer = bytearray(_PIECE_BYTES)
        view = memoryview(buffer)
        while got := os.readv(fd, [buffer]):
            crc = zlib.crc32(view[:got], crc)
            size += got
            if size % (4 * _PIECE_BYTES) == 0:
                os.posix_fadvise(fd, 0, size, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return size, crc
    finally:
        os.close(fd)
