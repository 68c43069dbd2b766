"""What `misactl plan` says of a training on a twin, beside the training itself.

The plan gets what is known before there is a run with misa: the model's shape, the twin's link, and one figure that is measured
on plain training, the arithmetic that it reaches. Nothing of the managed runs goes in.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.bench.report import ROOT

MISACTL = ROOT / "build" / "bin" / "misactl"
# The twins' weights, gradients and optimizer state are float32.
ELEMENT_BYTES = 4


def model_config(model: dict[str, Any]) -> dict[str, Any]:
    """The demo's model as a planner reads it."""
    return {
        "model_type": "transformer",
        "vocab_size": model["vocabulary"],
        "hidden_size": model["width"],
        "intermediate_size": 4 * model["width"],
        "num_hidden_layers": model["depth"],
        "num_attention_heads": model["heads"],
        "max_position_embeddings": model["context"],
        "gated": False,
        "bias": True,
        "norm_bias": True,
        "learned_positions": True,
        "tie_word_embeddings": True,
    }


def device_profile(twin: str, link_flops: float, hiding_tokens: float, duplex_factor: float, reached_flops: float,
                   capacity_bytes: int, latency_seconds: float = 0.0) -> dict[str, Any]:
    """The twin for `--device-file`: its link follows from `link_flops` (B = e/2 F / tau, docs/emulated.md), its compute is
    what training reaches."""
    rate = ELEMENT_BYTES / 2 * link_flops / hiding_tokens
    return {
        "name": f"{twin} twin",
        "capacity_bytes": capacity_bytes,
        "flops_per_second": reached_flops,
        "h2d_bytes_per_second": rate,
        "d2h_bytes_per_second": rate,
        "total_bytes_per_second": 2 * duplex_factor * rate,
        "latency_seconds": latency_seconds,
        "host_bytes": 1 << 40,
    }


class TwinPlan:
    """Plans of one training on one twin; `folder` takes their files."""

    def __init__(self, folder: Path, settings: dict[str, Any], hiding_tokens: float, duplex_factor: float) -> None:
        self._settings = settings
        self._hiding_tokens = hiding_tokens
        self._duplex_factor = duplex_factor
        self._model = folder / "model.json"
        self._device = folder / "device.json"
        self._model.write_text(json.dumps(model_config(settings["model"])), encoding="utf-8")

    def ask(self, *, mode: str, reached_flops: float, budget_bytes: int | None = None) -> dict[str, Any]:
        """misactl's answer; without a budget everything fits."""
        settings = self._settings
        capacity = budget_bytes or 1 << 40
        self._device.write_text(
            json.dumps(device_profile(settings["twin"], settings["compute_flops"], self._hiding_tokens, self._duplex_factor,
                                      reached_flops, capacity)),
            encoding="utf-8")
        command = [str(MISACTL), "plan", "--json", "--model", str(self._model), "--device-file", str(self._device),
                   "--precision", "fp32", "--optimizer", "adamw", "--checkpointing", "full", "--step", "deferred",
                   "--mode", mode, "--batch", str(settings["tokens_per_step"] // settings["model"]["context"]),
                   "--sequence", str(settings["model"]["context"]), "--micro-batch", str(settings["micro_batch"]),
                   "--budget", str(capacity)]
        if mode != "exact":
            command += ["--delta", str(settings["sampling"]["delta"])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"misactl plan ended with {done.returncode}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def reached_flops(self, mode: str, plain_step_seconds: float) -> float:
        """The arithmetic with which the plan's compute takes as long as plain training's step does."""
        guess = self._settings["compute_flops"]
        return guess * self.ask(mode=mode, reached_flops=guess)["compute_seconds"] / plain_step_seconds


def compare(answer: dict[str, Any], measured_step_seconds: float) -> dict[str, Any]:
    """A row's columns of a plan beside the measured step."""
    if not answer["fits"]:
        return {"plan_fits": False, "plan_reason": answer["reason"], "plan_error": None}
    return {
        "plan_fits": True,
        "plan_step_seconds": answer["step_seconds"],
        "plan_bound_step_seconds": answer["bound_step_seconds"],
        "plan_compute_seconds": answer["compute_seconds"],
        "plan_h2d_bytes_per_step": answer["loaded_bytes"],
        "plan_d2h_bytes_per_step": answer["unloaded_bytes"],
        "plan_peak_bytes": answer["peak_bytes"],
        "plan_error": answer["step_seconds"] / measured_step_seconds - 1,
    }
