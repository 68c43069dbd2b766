"""Writes the table of a run of `make exactness` into docs/exactness.md, between its marks.

    python tools/exactness_page.py [out/exactness/report.json]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- table: from out/exactness/report.json of one run -->", "<!-- end of table -->"


def table(title: str, rows: list[dict[str, Any]], key: Callable[[dict[str, Any]], str]) -> list[str]:
    """A line for each value of `key`: rows, identical ones, and the smallest budget that worked against plain's peak."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    lines = ["", f"| {title} | rows | identical | refused | tight budget / plain's peak (median, lowest) |",
             "| --- | --- | --- | --- | --- |"]
    for name, members in groups.items():
        tight = [r["budget_ratio"] for r in members if r["identical"] and r["features"][2] == "tight"]
        ratio = f"{statistics.median(tight):.2f}, {min(tight):.2f}" if tight else "–"
        lines.append(f"| {name} | {len(members)} | {sum(r['identical'] is True for r in members)} | "
                     f"{sum(r['refused'] is not None for r in members)} | {ratio} |")
    return lines


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "out/exactness/report.json"
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = sorted(report["rows"], key=lambda row: (row.get("kind", ""), row["model"]))
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    lines = [
        f"{len(rows)} rows in {report['seconds'] / 60:.0f} minutes: {report['identical']} identical, {report['refused']} refused "
        f"before the first step, {report['different']} different ({versions}).",
        *table("model", rows, lambda row: row["model"]),
        *table("optimizer", rows, lambda row: row["optimizer"]),
        *table("loop", sorted(rows, key=lambda row: row["features"][0]), lambda row: row["features"][0]),
        *table("step mode, pressure", sorted(rows, key=lambda row: row["features"][1:]),
               lambda row: ", ".join(row["features"][1:])),
    ]
    page = ROOT / "docs/exactness.md"
    text = page.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.split(END)[1], encoding="utf-8")


if __name__ == "__main__":
    main()
