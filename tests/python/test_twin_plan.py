"""The arithmetic that sets a plan beside a twin's measured step."""

from __future__ import annotations

import misa
import pytest

from demo.model import LanguageModel, ModelConfig
from tests.bench import twins
from tests.bench.twin_plan import TwinPlan, compare, device_profile

SETTINGS = {
    "twin": "a100-80g",
    "compute_flops": 8e10,
    "tokens_per_step": 1024,
    "micro_batch": 2,
    "model": {"vocabulary": 512, "width": 128, "depth": 3, "heads": 2, "context": 64, "checkpointing": True},
    "sampling": {"delta": 0.25},
}


def plan(folder) -> TwinPlan:
    return TwinPlan(folder, SETTINGS, misa.emulated.twins()["a100-80g"], 0.73)


def test_the_device_is_the_twin():
    device = device_profile("a100-80g", 8e10, 5800, 0.73, 5e10, 1 << 30, latency_seconds=1e-5)
    assert device["h2d_bytes_per_second"] == device["d2h_bytes_per_second"] == pytest.approx(2 * 8e10 / 5800)
    assert device["total_bytes_per_second"] == pytest.approx(2 * 0.73 * device["h2d_bytes_per_second"])
    assert device["flops_per_second"] == 5e10 and device["latency_seconds"] == 1e-5


def test_the_model_is_the_one_that_is_trained_and_its_compute_plain_trainings(folder):
    asked = plan(folder)
    reached = asked.reached_flops("exact", 2.5)
    answer = asked.ask(mode="exact", reached_flops=reached)
    assert answer["model"]["parameter_count"] == sum(p.numel() for p in LanguageModel(ModelConfig(**SETTINGS["model"])).parameters())
    assert answer["tokens_per_step"] == 1024
    assert answer["compute_seconds"] == pytest.approx(2.5)
    assert answer["step_seconds"] == pytest.approx(2.5) and answer["loaded_bytes"] == 0, "all of it is there"
    # Everything computes once forward, once again, and twice in backward: 8 operations a parameter and token, and attention.
    matrices = 3 * 12 * 128 * 128 + 512 * 128
    assert reached * 2.5 == pytest.approx(8 * matrices * 1024, rel=0.1)
    sampled = asked.ask(mode="sampled", reached_flops=reached)
    assert sampled["compute_seconds"] < 2.5


def test_a_budget_moves_bytes_and_one_too_small_is_told(folder):
    asked = plan(folder)
    whole = asked.ask(mode="exact", reached_flops=4e10)
    budget = int(0.6 * whole["plain_bytes"])
    part = asked.ask(mode="exact", reached_flops=4e10, budget_bytes=budget)
    assert part["fits"] and part["loaded_bytes"] > 0 and part["peak_bytes"] <= budget
    row = compare(part, part["step_seconds"] / 0.95)
    assert row["plan_error"] == pytest.approx(-0.05) and row["plan_h2d_bytes_per_step"] == part["loaded_bytes"]
    row = compare(asked.ask(mode="exact", reached_flops=4e10, budget_bytes=1 << 20), 1.0)
    assert row["plan_fits"] is False and row["plan_error"] is None and "at once" in row["plan_reason"]


def test_a_rows_figures():
    report = {
        "bound_link_seconds": 4.0, "bound_step_seconds": 3.0, "bound_h2d_bytes_per_step": 400, "bound_d2h_bytes_per_step": 100,
        "loaded_bytes": [0, 450], "unloaded_bytes": [0, 100], "stall_seconds_median": 0.1, "predicted_step_seconds": 4.8,
        "demand_loads": 1, "prefetch_loads": 2, "departures": 0, "plan_version": 1, "notices": [],
        "device": {"h2d_bytes_per_second": 100, "d2h_bytes_per_second": 100, "duplex_h2d_bytes_per_second": 73,
                   "duplex_d2h_bytes_per_second": 73},
    }
    managed = {"run": "managed", "share": 0.4, "budget_bytes": 500, "step_seconds": [9.0, 5.0], "device_peak_bytes": 490,
               "device_stddev_bytes": 10.0, "largest_module_bytes": 100, "state_sha256": "x", "report": report}
    plain = {"run": "plain", "step_seconds": [9.0, 4.5], "device_peak_bytes": 1250, "state_sha256": "x"}
    demand = {"run": "demand", "share": 0.4, "step_seconds": [9.0, 8.0], "device_stddev_bytes": 100.0}
    answer = {"fits": True, "step_seconds": 5.4, "bound_step_seconds": 4, "compute_seconds": 4.5, "loaded_bytes": 1,
              "unloaded_bytes": 2, "peak_bytes": 3}
    settings = {**SETTINGS, "mode": "exact", "warm_up": 1}
    (row,) = twins.rows_of(settings, [plain, managed, demand], lambda _: answer)
    # 400 up and 100 down: at 73 both ways for 100 / 73 s, and the other 300 at 100.
    assert row["bound_step_seconds"] == pytest.approx(max(4.5, 100 / 73 + 3.0))
    assert row["step_over_bound"] == pytest.approx(5.0 / 4.5)
    assert row["speed_over_plain"] == 0.9 and row["bound_allows"] and row["peak_over_plain"] == 0.392
    assert row["modules_over_bound"] == {"h2d": 0.5, "d2h": 0.0}
    assert row["plan_error"] == pytest.approx(0.08) and row["stddev_over_demand"] == 0.1
    assert row["goals"] == {"step_over_bound": False, "bytes_over_bound": True, "identical": True, "within_budget": True,
                            "prediction": True, "plan": True, "deviation": True, "peak_at_speed": False}
    refused = {"run": "managed", "share": 0.1, "budget_bytes": 50, "refused": "too small"}
    assert "goals" not in twins.rows_of(settings, [plain, refused], lambda _: answer)[0]
