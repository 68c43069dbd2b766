"""misa-train as a process: the same bits as plain within a third of the memory, and sentences where that cannot be."""

import json
import random
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build/bin"
# 4.9 million parameters, 75 MiB of training state; activations of one sequence take little of it.
MODEL = "--steps 8 --batch 1 --sequence 64 --width 256 --layers 6 --heads 4 --warmup-steps 4 --threads 1 --seed 3".split()
BUDGET_BYTES = 24 << 20


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    words = ["memory", "is", "owned", "by", "one", "daemon", "and", "lent", "to", "many", "trainers"]
    choose = random.Random(1)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(choose.choice(words) for _ in range(4000)), encoding="utf-8")
    return path


def train(*arguments: object) -> subprocess.CompletedProcess:
    command = [BIN / "misa-train", *(str(a) for a in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def figures(folder: Path, *arguments: object) -> dict:
    report = folder / "report.json"
    done = train(*arguments, "--json", report)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return json.loads(report.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def plain(text, tmp_path_factory) -> dict:
    return figures(tmp_path_factory.mktemp("plain"), "--text", text, *MODEL, "--mode", "plain")


def test_plain_learns_and_needs_three_times_the_budget(plain):
    assert plain["loss_last"] < plain["loss_first"]
    assert plain["device_peak_bytes"] > 3 * BUDGET_BYTES


@pytest.mark.parametrize("step", ["deferred", "in_backward", "eager"])
def test_exact_gives_the_same_bits_within_the_budget(text, plain, tmp_path, step):
    exact = figures(tmp_path, "--text", text, *MODEL, "--budget", BUDGET_BYTES, "--daemon", "private", "--disk", tmp_path,
                    "--step", step)
    assert exact["state_sha256"] == plain["state_sha256"]
    assert exact["losses"] == plain["losses"]
    assert exact["device_peak_bytes"] <= exact["budget_bytes"] == BUDGET_BYTES
    assert exact["unloads"] > 0
    assert exact["notices"] == []
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


def test_clipping_gives_the_same_bits(text, tmp_path):
    common = ["--text", text, *MODEL, "--clip", 0.5]
    plain = figures(tmp_path, *common, "--mode", "plain")
    exact = figures(tmp_path, *common, "--budget", BUDGET_BYTES, "--daemon", "private", "--disk", tmp_path)
    assert exact["state_sha256"] == plain["state_sha256"]
    refused = train(*common, "--budget", BUDGET_BYTES, "--step", "in_backward")
    assert refused.returncode == 1
    assert "--clip needs all gradients" in refused.stderr


def test_sampled_keeps_less_optimizer_state(text, plain, tmp_path):
    sampled = figures(tmp_path, "--text", text, *MODEL, "--budget", BUDGET_BYTES, "--daemon", "private", "--disk", tmp_path,
                      "--mode", "sampled", "--delta", 0.3, "--inner-steps", 3)
    assert sampled["device_peak_bytes"] <= BUDGET_BYTES
    assert sampled["loss_last"] < sampled["loss_first"]
    assert sampled["state_sha256"] != plain["state_sha256"]


def test_a_budget_too_small_is_a_sentence(text, tmp_path):
    done = train("--text", text, *MODEL, "--budget", "2MiB", "--daemon", "private", "--disk", tmp_path)
    assert done.returncode == 1
    assert "The budget of 2MiB is too small" in done.stderr
    assert "smallest budget that works" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--budget", "2 apples"], "not a size"),
        (["--budget", "24MiB", "--daemon", "required", "--runtime-dir", "/nonexistent"], "No misad listens on"),
        (["--mode", "plain", "--width", "30", "--heads", "4"], "cannot be divided"),
        (["--mode", "plain", "--text", "/nonexistent/text"], "cannot be read (No such file"),
        (["--mode", "plain", "--text", "/"], "cannot be read (Is a directory"),
    ],
)
def test_what_cannot_be_is_a_sentence(text, arguments, sentence):
    named = [] if "--text" in arguments else ["--text", text]
    done = train(*named, *arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_wrong_usage_has_a_status_of_its_own(text):
    assert train().returncode == 2
    done = train("--text", text)
    assert done.returncode == 2
    assert "--budget" in done.stderr


def test_help_begins_with_examples():
    done = train("--help")
    assert done.returncode == 0
    assert 0 < done.stdout.index("Examples:") < done.stdout.index("Options:")
