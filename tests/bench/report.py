"""Where benchmarks write what they measured: one JSON object a file under out/bench."""

from __future__ import annotations

import json
import platform
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def write_report(name: str, rows: list[dict[str, Any]], **facts: Any) -> Path:
    """Writes out/bench/NAME.json and returns its path."""
    path = ROOT / "out" / "bench" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "schema": "misa.bench/1",
        "name": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "processor": processor_name(),
        **facts,
        "rows": rows,
    }
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return path
