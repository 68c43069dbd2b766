"""How the demo shows what it finds: byte sizes, the table, the sentences and the plot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Run = dict[str, Any]

_COLOURS = {"plain": "#8a8a8a", "exact": "#1f6fb4", "sampled_reference": "#8a8a8a", "sampled": "#d1632a"}


def mebibytes(count: int | float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f} MiB"


def table(runs: list[Run]) -> str:
    """Returns one line a run, columns padded with blanks."""
    titles = ["run", "budget", "peak", "cgroup peak", "limit", "step", "stall", "tokens/s", "loss", "state sha256"]
    rows = [titles]
    for run in runs:
        rows.append(
            [
                run["name"],
                mebibytes(run["budget_bytes"]),
                mebibytes(run["device_peak_bytes"]),
                mebibytes(run["cgroup_peak_bytes"]),
                mebibytes(run["limit_bytes"]),
                f"{run['step_seconds_median']:.2f} s",
                f"{run['stall_seconds_median']:.2f} s",
                f"{run['tokens_per_second']:,.0f}",
                f"{run['loss_first']:.3f} → {run['loss_last']:.3f}",
                run["state_sha256"][:12],
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    left = {0, len(titles) - 1}
    lines = []
    for row in rows:
        cells = (cell.ljust(width) if i in left else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths)))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def findings(runs: list[Run], identical: dict[str, bool]) -> list[str]:
    """Returns a sentence for each managed run beside its yardstick."""
    by_name = {run["name"]: run for run in runs}
    plain = by_name["plain"]
    sentences = []
    for name, reference in (("exact", "plain"), ("sampled", "sampled_reference")):
        run = by_name[name]
        same = "bit-identical to" if identical[name] else "NOT identical to"
        memory = run["device_peak_bytes"] / plain["device_peak_bytes"]
        seconds = run["step_seconds_median"] / by_name[reference]["step_seconds_median"]
        sentences.append(
            f"{name} is {same} {reference}, in {memory:.0%} of plain's memory, at {seconds:.2f} × {reference}'s step time."
        )
    return sentences


def problems(runs: list[Run], identical: dict[str, bool]) -> list[str]:
    """Returns a sentence for everything that did not hold."""
    sentences = []
    for name, reference in (("exact", "plain"), ("sampled", "sampled_reference")):
        if not identical[name]:
            sentences.append(f"{name}'s state differs from {reference}'s after the same steps.")
    for run in runs:
        if run["budget_bytes"] is not None and run["device_peak_bytes"] > run["budget_bytes"]:
            sentences.append(
                f"{run['name']} used {mebibytes(run['device_peak_bytes'])} at once, "
                f"more than its budget of {mebibytes(run['budget_bytes'])}."
            )
        if run["limit_bytes"] is not None and (run["cgroup_peak_bytes"] or 0) > run["limit_bytes"]:
            sentences.append(
                f"{run['name']}'s memory cgroup reached {mebibytes(run['cgroup_peak_bytes'])}, "
                f"more than its limit of {mebibytes(run['limit_bytes'])}."
            )
    return sentences


def plot(runs: list[Run], timelines: dict[str, list[list[float]]], budget_bytes: int, path: Path) -> None:
    """Draws device bytes over time: each managed run above its yardstick, one panel a pair."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = {
        "plain": "plain PyTorch",
        "exact": "misa, exact",
        "sampled_reference": "plain loop, same draws",
        "sampled": "misa, sampled",
    }
    peaks = {run["name"]: run["device_peak_bytes"] / 2**20 for run in runs}
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    panels = (("Every parameter trained", "plain", "exact"), ("Modules sampled by importance", "sampled_reference", "sampled"))
    for axis, (title, *names) in zip(axes, panels):
        for name in names:
            timeline = timelines[name]
            start = timeline[0][0] if timeline else 0.0
            axis.plot(
                [seconds - start for seconds, _ in timeline],
                [count / 2**20 for _, count in timeline],
                color=_COLOURS[name],
                linewidth=0.8,
                label=f"{labels[name]} (peak {peaks[name]:,.0f} MiB)",
            )
        budget = budget_bytes / 2**20
        axis.axhline(budget, color="black", linestyle="--", linewidth=1, label=f"budget ({budget:,.0f} MiB)")
        axis.set_title(title, fontsize=11)
        axis.set_xlabel("seconds since the run's start")
        axis.grid(alpha=0.25)
        axis.margins(x=0.01)
        legend = axis.legend(loc="upper center", ncols=1, fontsize=9, framealpha=0.95)
        for line in legend.get_lines():
            line.set_linewidth(2)
    axes[0].set_ylabel("device memory (MiB)")
    axes[0].set_ylim(bottom=0, top=max(peaks.values()) * 1.45)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
