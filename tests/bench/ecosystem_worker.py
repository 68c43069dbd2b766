"""One case of the comparison in ecosystem.py, as a process of its own: `python -m tests.bench.ecosystem_worker JSON`."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

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


@dataclasses.dataclass
class Loop:
    """How a case takes a step. `present` has a parameter's whole content there inside the context."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer | None
    zero_grad: Callable[[], Any]
    backward: Callable[[torch.Tensor], Any]
    step: Callable[[], Any]
    present: Callable[..., Any] = misa.resident
    note: str = ""


def plain_loop(model: torch.nn.Module) -> Loop:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return Loop(model, optimizer, optimizer.zero_grad, torch.Tensor.backward, optimizer.step)


def deepspeed_loop(model: torch.nn.Module, folder: Path) -> Loop:
    """ZeRO-3 in one process, with parameters and optimizer state on the disk where libaio's headers let it build the way there;
    the optimizer is torch's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    disk = {"device": "nvme", "nvme_path": str(folder), "pin_memory": False}
    on_disk = get_accelerator().create_op_builder("AsyncIOBuilder").is_compatible(verbose=False)
    offload = {
        "offload_param": {**disk, "buffer_count": 8, "buffer_size": 4_000_000, "max_in_cpu": 0},
        "offload_optimizer": {**disk, "buffer_count": 4},
    }
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {
                "stage": 3, "sub_group_size": 4_000_000, "reduce_bucket_size": 4_000_000,
                "stage3_prefetch_bucket_size": 4_000_000, "stage3_param_persistence_threshold": 10_000,
                "stage3_max_live_parameters": 8_000_000, "stage3_max_reuse_distance": 8_000_000,
                **(offload if on_disk else {}),
            },
        },
    )
    return Loop(engine, None, lambda: None, engine.backward, engine.step,
                lambda parameter: deepspeed.zero.GatheredParameters([parameter]),
                "" if on_disk else "state stays in memory: libaio's headers are missing, without which DeepSpeed has no way to disk")


def weights_sha256(loop: Loop) -> str:
    """One number for all weights, each looked at by itself."""
    digest = hashlib.sha256()
    model = getattr(loop.model, "module", loop.model)
    for name, parameter in sorted(model.named_parameters()):
        with torch.no_grad(), loop.present(parameter):
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}\n".encode())
            digest.update(memoryview(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    case = settings["case"]
    with tempfile.TemporaryDirectory(dir=settings["disk"]) as name:
        misa.memory.reset_peak()
        model = prepare(case, make_model(settings), Path(name))
        loop = deepspeed_loop(model, Path(name)) if case.startswith("deepspeed") else plain_loop(model)
        model = loop.model
        manage: Any = contextlib.nullcontext()
        if case == "misa":
            manage = misa.manage(model, loop.optimizer, budget=settings["budget"], daemon="private", disk=settings["disk"])
        seconds: list[float] = []
        losses: list[float] = []
        result: dict[str, Any] = {"trained": False, "note": loop.note}

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
                    loop.zero_grad()
                    loss = loss_of(step)
                    loop.backward(loss)
                    loop.step()
                    seconds.append(time.perf_counter() - begin)
                    losses.append(loss.item())
                # Running to the end is not training: some weight has to have moved.
                result["trained"] = evaluate() != before
                result["weights_sha256"] = weights_sha256(loop)
                if loop.optimizer is not None:
                    result["state_sha256"] = misa.state_sha256(model, loop.optimizer)
            except Exception as error:
                result["error"] = f"{type(error).__name__}: {error}"
        print(json.dumps({**result, "losses": losses, "step_seconds": seconds, "device_peak_bytes": misa.memory.peak_bytes()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
