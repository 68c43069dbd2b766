"""The demo's parts by themselves, and the demo itself at its smallest size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from demo import data, show
from demo.cgroup import CgroupUnavailable, MemoryCgroup

ROOT = Path(__file__).resolve().parents[2]
RUN_NAMES = ["plain", "exact", "sampled", "sampled_reference"]


def run_figures(name: str, **changes) -> dict:
    figures = {
        "name": name,
        "budget_bytes": 100 << 20 if name in ("exact", "sampled") else None,
        "limit_bytes": 150 << 20 if name in ("exact", "sampled") else None,
        "device_peak_bytes": 90 << 20 if name in ("exact", "sampled") else 300 << 20,
        "cgroup_peak_bytes": 140 << 20,
        "step_seconds_median": 1.5,
        "stall_seconds_median": 0.01,
        "tokens_per_second": 682.0,
        "loss_first": 8.4,
        "loss_last": 6.9,
        "state_sha256": "ab" * 32,
    }
    return {**figures, **changes}


class TestData:
    def test_tokens_decode_to_the_very_text(self):
        text = "In the beginning God created the heaven and the earth.\nAnd the größte  word, twice: the the\n"
        vocabulary = data.build_vocabulary(text, 256 + 4)
        tokens = data.encode(text, vocabulary)
        assert vocabulary[0] == " the"
        assert len(tokens) < len(text)
        assert data.decode(tokens, vocabulary) == text

    def test_vocabulary_does_not_depend_on_the_order_of_equals(self):
        assert data.build_vocabulary("bb aa cc", 300) == data.build_vocabulary("bb aa cc", 300)
        assert data.build_vocabulary("bb\naa\ncc", 300) == ["aa", "bb", "cc"]

    def test_a_missing_program_is_a_sentence_that_says_what_to_install(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nonexistent")
        with pytest.raises(data.DataError, match="bible-kjv"):
            data.read_text()

    def test_the_text_is_there_and_whole(self, tmp_path):
        corpus = data.prepare(tmp_path, 4096)
        assert corpus.text_bytes > 4_000_000
        assert corpus.tokens.max() < 4096
        description = json.loads((tmp_path / "corpus.json").read_text(encoding="utf-8"))
        assert data.decode(corpus.tokens[:60], description["pieces"]).startswith("In the beginning God created the heaven")


def usable_cgroup(name: str, limit: int | None) -> MemoryCgroup:
    try:
        return MemoryCgroup(name, limit)
    except CgroupUnavailable as reason:
        pytest.skip(str(reason))


class TestCgroup:
    def allocate(self, group: MemoryCgroup, mebibytes: int) -> int:
        code = f"import time; x = bytearray({mebibytes} << 20)"
        return subprocess.run([sys.executable, "-c", code], preexec_fn=group.join, timeout=60).returncode

    def test_counts_what_a_process_used_and_is_gone_afterwards(self):
        with usable_cgroup("test-peak", 300 << 20) as group:
            assert self.allocate(group, 100) == 0
            peak = group.peak_bytes()
            assert peak is None or 100 << 20 < peak <= 300 << 20
            assert group.oom_kills() == 0
            path = group._path
        assert not path.exists()

    def test_the_kernel_ends_a_process_that_needs_more_than_the_limit(self):
        with usable_cgroup("test-oom", 64 << 20) as group:
            assert self.allocate(group, 200) == -9
            assert group.oom_kills() == 1

    def test_a_process_left_behind_is_ended_with_the_group(self):
        with usable_cgroup("test-left", None) as group:
            left = subprocess.Popen(["sleep", "600"], preexec_fn=group.join)
        assert left.wait(timeout=30) == -9

    def test_no_hierarchy_is_a_sentence(self, monkeypatch):
        monkeypatch.setattr("demo.cgroup._find_hierarchy", lambda: (_ for _ in ()).throw(CgroupUnavailable("none here")))
        with pytest.raises(CgroupUnavailable, match="none here"):
            MemoryCgroup("test", None)

    def test_version_two_sets_the_limit_and_no_swap(self, monkeypatch, tmp_path):
        from demo import cgroup

        (tmp_path / "cgroup.subtree_control").write_text("cpu\n", encoding="ascii")
        monkeypatch.setattr(cgroup, "_find_hierarchy", lambda: cgroup._Hierarchy(2, tmp_path, tmp_path))
        group = MemoryCgroup("test", 4096)
        assert (tmp_path / "cgroup.subtree_control").read_text(encoding="ascii") == "+memory"
        assert (group._path / "memory.max").read_text(encoding="ascii") == "4096"
        for name, text in (("memory.current", "12\n"), ("memory.peak", "34\n"), ("memory.events", "oom 3\noom_kill 2\n")):
            (group._path / name).write_text(text, encoding="ascii")
        assert (group.usage_bytes(), group.peak_bytes(), group.oom_kills()) == (12, 34, 2)
        # The kernel's files go with the folder; these have to go before it.
        for file in group._path.iterdir():
            file.unlink()
        group.close()
        assert not group._path.exists()


class TestShow:
    def test_table_is_aligned_and_without_tabs(self):
        text = show.table([run_figures(name) for name in RUN_NAMES])
        assert "\t" not in text
        assert len(text.splitlines()) == 5
        assert "100 MiB" in text

    def test_problems_are_sentences(self):
        good = [run_figures(name) for name in RUN_NAMES]
        same = {"exact": True, "sampled": True}
        assert show.problems(good, same) == []
        assert show.problems(good, {"exact": False, "sampled": True}) == [
            "exact's state differs from plain's after the same steps."
        ]
        over = [run_figures(name, **({"device_peak_bytes": 101 << 20} if name == "exact" else {})) for name in RUN_NAMES]
        assert show.problems(over, same) == ["exact used 101 MiB at once, more than its budget of 100 MiB."]
        beyond = [run_figures(name, **({"cgroup_peak_bytes": 151 << 20} if name == "sampled" else {})) for name in RUN_NAMES]
        assert len(show.problems(beyond, same)) == 1

    def test_no_cgroup_is_shown_as_a_dash(self):
        text = show.table([run_figures(name, cgroup_peak_bytes=None, limit_bytes=None) for name in RUN_NAMES])
        assert " - " in text

    def test_plot_is_a_picture(self, tmp_path):
        timelines = {name: [[0.0, 1e8], [0.5, 2e8], [1.0, 1.5e8]] for name in RUN_NAMES}
        show.plot([run_figures(name) for name in RUN_NAMES], timelines, 100 << 20, tmp_path / "memory.png")
        assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


class TestWholeDemo:
    def test_exact_and_sampled_are_bit_identical_within_budget_and_limit(self, tmp_path):
        command = [sys.executable, "-m", "demo", "--size", "tiny", "--steps", "8", "--inner-steps", "3", "--batch", "2",
                   "--budget-share", "0.5", "--out", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
        assert report["schema"] == "misa.demo/1"
        runs = {run["name"]: run for run in report["runs"]}
        assert list(runs) == RUN_NAMES
        assert runs["exact"]["state_sha256"] == runs["plain"]["state_sha256"]
        assert runs["sampled"]["state_sha256"] == runs["sampled_reference"]["state_sha256"]
        assert runs["sampled"]["state_sha256"] != runs["plain"]["state_sha256"]
        for name in ("exact", "sampled"):
            assert runs[name]["device_peak_bytes"] <= report["budget_bytes"]
            if runs[name]["cgroup_peak_bytes"] is not None:
                assert runs[name]["cgroup_peak_bytes"] <= report["limit_bytes"]
        assert "bit-identical to plain" in done.stdout
        assert (tmp_path / "memory.png").exists()

    def test_wrong_arguments_are_refused(self):
        done = subprocess.run([sys.executable, "-m", "demo", "--steps", "0"], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert "at least 1" in done.stderr
