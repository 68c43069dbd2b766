"""Writes the figures of one demo run into the README, between its figure marks.

    python tools/readme_figures.py [out/demo/report.json]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures: from out/demo/report.json of one run -->", "<!-- end of figures -->"


def main() -> None:
    report = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out/demo/report.json").read_text(encoding="utf-8"))
    runs = {run["name"]: run for run in report["runs"]}
    lines = [
        f"One run, on {report['device']['name']} with two cores ({report['model']['parameter_count'] / 1e6:.1f} million parameters, "
        f"{runs['plain']['steps']} steps of {report['data']['tokens_per_step']} tokens):",
        "",
        "| run | device peak | cgroup peak / limit | step (median) | stall | loss | state SHA-256 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in ("plain", "exact", "sampled_reference", "sampled"):
        run = runs[name]
        peak = "–" if run["cgroup_peak_bytes"] is None else f"{run['cgroup_peak_bytes'] / 2**20:.0f} MiB"
        limit = "none" if not run.get("limit_bytes") else f"{run['limit_bytes'] / 2**20:.0f} MiB"
        lines.append(
            f"| `{name}` | {run['device_peak_bytes'] / 2**20:.0f} MiB | {peak} / {limit} | {run['step_seconds_median']:.2f} s | "
            f"{run['stall_seconds_median']:.2f} s | {run['loss_first']:.3f} → {run['loss_last']:.3f} | "
            f"`{run['state_sha256'][:12]}…` |"
        )
    lines += ["", "![Device memory over time: plain PyTorch far above the budget, misa under it](docs/images/demo-memory.png)"]
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    readme.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
