"""Emulated devices: real training on this machine's processor behind a link whose time is modelled.

    with misa.manage(model, optimizer, budget="1GiB", device="emulated:rtx-3090"):
        ...

The device's memory and the host tier below it are both RAM; copies between them are real and take the time that the
modelled link says. A *twin* keeps a real GPU's proportion between compute and link, so that throughput relative to plain
training carries over. See docs/emulated.md.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time

import torch

from . import _C

_PREFIX = "emulated:"


@dataclasses.dataclass(frozen=True)
class Emulated:
    """An emulated device of a private daemon: a twin, or a link given by its rates.

    Attributes:
        twin: "rtx-3090", "a100-80g" or "h200"; None where both rates are given.
        compute_flops: float32 operations a second that the twin's link is a part of (`measure_flops`); None measures them
            when a model is managed. Runs that are compared need one figure for all.
        load_bytes_per_second, unload_bytes_per_second: rates instead of the twin's.
        duplex_factor: a direction's rate while the other one is busy, as a part of its rate alone, in (0, 1].
        latency_seconds: before each copy.
    """

    twin: str | None = None
    compute_flops: float | None = None
    load_bytes_per_second: float | None = None
    unload_bytes_per_second: float | None = None
    duplex_factor: float | None = None
    latency_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.twin is None and (self.load_bytes_per_second is None or self.unload_bytes_per_second is None):
            raise ValueError("An emulated device needs a twin, or load_bytes_per_second and unload_bytes_per_second.")
        if self.twin is not None and self.twin not in twins():
            raise ValueError(f"No twin is called {self.twin!r}; there are {', '.join(twins())}.")
        for name in ("compute_flops", "load_bytes_per_second", "unload_bytes_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} is {value!r}, but must be a number above 0.")
        if self.duplex_factor is not None and not 0 < self.duplex_factor <= 1:
            raise ValueError(f"duplex_factor is {self.duplex_factor!r}, but must lie above 0 and up to 1.")
        if self.latency_seconds is not None and not 0 <= self.latency_seconds <= 1:
            raise ValueError(f"latency_seconds is {self.latency_seconds!r}, but must lie from 0 to 1.")

    def for_daemon(self) -> _C.EmulatedDevice:
        return _C.EmulatedDevice(
            twin=self.twin or "",
            compute_flops=self.compute_flops or 0,
            load_bytes_per_second=self.load_bytes_per_second or 0,
            unload_bytes_per_second=self.unload_bytes_per_second or 0,
            duplex_factor=self.duplex_factor or 0,
            latency_seconds=-1 if self.latency_seconds is None else self.latency_seconds,
        )


def twins() -> dict[str, float]:
    """The twins, and for each the tokens whose forward hides the load of one layer's weights."""
    return dict(_C.twins())


def parse(device: str | Emulated | None) -> Emulated | None:
    """What `misa.manage` takes as `device`: None or "cpu", "emulated:TWIN", or an `Emulated`."""
    if device is None or device == "cpu":
        return None
    if isinstance(device, Emulated):
        return device
    if isinstance(device, str) and device.startswith(_PREFIX):
        return Emulated(twin=device[len(_PREFIX) :])
    raise ValueError(f"device is {device!r}, but must be \"cpu\", \"emulated:TWIN\" (TWIN: {', '.join(twins())}) or a "
                     "misa.Emulated.")


def measure_flops(rows: int, inputs: int, outputs: int, seconds: float = 0.5) -> float:
    """float32 operations a second of a matrix multiplication of this shape, with torch's threads as they are set: the
    median over about `seconds`."""
    a = torch.randn(rows, inputs)
    b = torch.randn(inputs, outputs)
    out = torch.empty(rows, outputs)
    rates: list[float] = []
    end = time.perf_counter() + seconds
    with torch.no_grad():
        torch.mm(a, b, out=out)
        while time.perf_counter() < end or len(rates) < 3:
            begin = time.perf_counter()
            torch.mm(a, b, out=out)
            rates.append(2.0 * rows * inputs * outputs / (time.perf_counter() - begin))
    return statistics.median(rates)


def with_compute(device: Emulated, model: list[torch.nn.Module]) -> Emulated:
    """The device with its compute measured on the model's largest matrix, where that is still open."""
    if device.twin is None or device.compute_flops is not None:
        return device
    matrices = [p for m in model for p in m.parameters() if p.dim() == 2]
    if not matrices:
        return device  # the daemon measures
    outputs, inputs = max(matrices, key=lambda p: p.numel()).shape
    flops = measure_flops(1024, inputs, outputs, 0.3)
    print(f"misa: {device.twin} twin: this process multiplies at {flops / 1e9:.1f} GFLOP/s, and the link is a part of that. "
          "Give misa.Emulated(compute_flops=…) the same figure in runs that are to be compared.", file=sys.stderr)
    return dataclasses.replace(device, compute_flops=flops)
