"""What a managed run tells a framework's progress bar and loggers."""

from __future__ import annotations

from .. import memory
from .._manage import Run

_MIB = 1 << 20


class Figures:
    """Figures of a run since the last time it was asked; cheap enough for every logging step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._before = self._totals()

    def _totals(self) -> tuple[int, float, int]:
        assert self._run._manager is not None
        totals = self._run._manager.totals()
        return (totals["demand_loads"] + totals["prefetch_loads"], float(sum(totals["stall_seconds"])),
                len(totals["stall_seconds"]))

    def take(self) -> dict[str, float]:
        """`misa/…` entries, as loggers like them: MiB on the device, loads and stalled seconds a step."""
        loads, stall_seconds, steps = now = self._totals()
        before, self._before = self._before, now
        count = max(1, steps - before[2])
        return {
            "misa/device_mib": round(memory.live_bytes() / _MIB, 2),
            "misa/device_peak_mib": round(memory.peak_bytes() / _MIB, 2),
            "misa/budget_mib": round(self._run.budget_bytes / _MIB, 2),
            "misa/loads_per_step": round((loads - before[0]) / count, 2),
            "misa/stall_seconds_per_step": round((stall_seconds - before[1]) / count, 4),
        }
