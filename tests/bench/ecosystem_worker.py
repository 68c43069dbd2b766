"""One case of the comparison in ecosystem.py, as a process of its own: `python -m tests.bench.ecosystem_worker JSON`."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import misa  # noqa: E402
import torch  # noqa: E402
from transformers import GPT2Config, GPT2LMHeadModel  # noqa: E402


def make_model(settings: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(
        vocab_size=settings["vocabulary"], n_embd=settings["width"], n_layer=settings["layers"],
        n_head=settings["width"] // 64, n_positions=settings["length"], bos_token_id=0, eos_token_id=0))


def prepare(case: str, model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    """What the case does to the model before it is trained."""
    if case == "torch mmap":
        torch.save(model.state_dict(), folder / "weights.pt")
        model.load_state_dict(torch.load(folder / "weights.pt", mmap=True), assign=True)
        model.tie_weights()
    if case == "accelerate disk_offload":
        from accelerate import disk_offload

        disk_offload(model, str(folder / "offload"), execution_device=torch.device("cpu"))
    return model


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    case = settings["case"]
    with tempfile.TemporaryDirectory(dir=settings["disk"]) as name:
        misa.memory.reset_peak()
        model = prepare(case, make_model(settings), Path(name))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        manage: Any = contextlib.nullcontext()
        if case == "misa":
            manage = misa.manage(model, optimizer, budget=settings["budget"], daemon="private", disk=settings["disk"])
        seconds: list[float] = []
        losses: list[float] = []
        result: dict[str, Any] = {"trained": False}

        def loss_of(step: int) -> torch.Tensor:
            draw = torch.Generator().manual_seed(step)
            tokens = torch.randint(settings["vocabulary"], (settings["rows"], settings["length"]), generator=draw)
            return model(input_ids=tokens, labels=tokens).loss

        def evaluate() -> float:
            model.eval()
            with torch.no_grad():
                value = loss_of(0).item()
            model.train()
            return value

        with manage:
            try:
                before = evaluate()
                for step in range(settings["steps"]):
                    begin = time.perf_counter()
                    optimizer.zero_grad()
                    loss = loss_of(step)
                    loss.backward()
                    optimizer.step()
                    seconds.append(time.perf_counter() - begin)
                    losses.append(loss.item())
                # Running to the end is not training: some weight has to have moved.
                result["trained"] = evaluate() != before
                result["state_sha256"] = misa.state_sha256(model, optimizer)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps({**result, "losses": losses, "step_seconds": seconds, "device_peak_bytes": misa.memory.peak_bytes()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
