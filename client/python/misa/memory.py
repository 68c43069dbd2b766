"""Bytes on the device: the pool's chunks that hold pages, and every other CPU tensor of this process."""

from __future__ import annotations

from types import TracebackType

from . import _C


def live_bytes() -> int:
    """Bytes now."""
    return _C.live_bytes()


def peak_bytes() -> int:
    """The highest `live_bytes` since the start, `reset_peak` or `manage`."""
    return _C.peak_bytes()


def reset_peak() -> None:
    """Lets `peak_bytes` begin again at the bytes now."""
    _C.reset_peak()


class Timeline:
    """Samples `live_bytes` every `interval_seconds` while the context is open.

    `samples` is a list of `[seconds since the start, bytes]`, at most 4096 of them (the interval doubles when there
    would be more); `stddev_bytes` is the population standard deviation over everything sampled.
    """

    def __init__(self, interval_seconds: float = 0.005) -> None:
        self._timeline = _C.Timeline()
        self._interval_seconds = interval_seconds

    def __enter__(self) -> Timeline:
        self._timeline.start(self._interval_seconds)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._timeline.stop()

    @property
    def samples(self) -> list[list[float]]:
        return [[seconds, bytes_] for seconds, bytes_ in self._timeline.samples()]

    @property
    def stddev_bytes(self) -> float:
        return self._timeline.stddev_bytes()
