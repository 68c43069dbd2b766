"""One case of the memory-limit benchmark: a process that trains when told to and says what it measured.

Reads commands from standard input, one a line (`prepare`, `steps N`, `finish`), and answers each with one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import misa


class Block(torch.nn.Module):
    """A residual block of two matrices; the activation in place, as one writes it when memory is short."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, hidden)
        self.act = torch.nn.ReLU(inplace=True)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self, width: int, hidden: int, blocks: int, recompute: bool) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(width, hidden) for _ in range(blocks))
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._recompute else block(x)
        return x


def read_io() -> tuple[int, int]:
    """Bytes this process has caused to be read from and written to disks."""
    values = dict(line.split(": ") for line in Path("/proc/self/io").read_text(encoding="ascii").splitlines())
    return int(values["read_bytes"]), int(values["write_bytes"])


class MappedState:
    """Every tensor of the training state in one shared file mapping: what the kernel's page cache makes of it."""

    def __init__(self, directory: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._parameters = list(model.parameters())
        bytes_ = sum(p.numel() * p.element_size() for p in self._parameters) * 4
        self._path = Path(directory) / f"misa-bench-{os.getpid()}.mapped"
        with open(self._path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, bytes_)
        storage = torch.UntypedStorage.from_file(str(self._path), shared=True, nbytes=bytes_)
        self._path.unlink()
        offset = 0

        def take(like: torch.Tensor) -> torch.Tensor:
            nonlocal offset
            tensor = torch.empty(0, dtype=like.dtype).set_(storage, offset // like.element_size(), like.shape)
            offset += like.numel() * like.element_size()
            return tensor

        self._gradients: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in self._parameters:
            home = take(parameter)
            home.copy_(parameter.data)
            parameter.data = home
            self._gradients[parameter] = take(parameter)
            optimizer.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": take(parameter).zero_(),
                "exp_avg_sq": take(parameter).zero_(),
            }
            parameter.register_post_accumulate_grad_hook(self._keep)

    def _keep(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad = self._gradients[parameter].copy_(parameter.grad)


def warm_up(options: argparse.Namespace) -> None:
    model = Model(options.width, options.hidden, 1, options.recompute)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.nn.functional.mse_loss(model(torch.randn(options.rows, options.width)), torch.zeros(options.rows, options.width)).backward()
    optimizer.step()
    del model, optimizer
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--blocks", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--disk", required=True)
    parser.add_argument("--recompute", action="store_true", help="activations of a block again in the backward pass")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    def answer(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    # What torch loads and allocates for itself at a first step (its compiler's modules, the math library's buffers) belongs
    # to the base line: one block of the same shape goes through one step.
    warm_up(options)
    answer(ready=True)

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    stack = contextlib.ExitStack()
    run: misa.Run | None = None
    step = 0
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "prepare":
            budget = int(arguments[0])
            torch.manual_seed(0)
            model = Model(options.width, options.hidden, options.blocks, options.recompute)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            if options.case == "mmap":
                MappedState(options.disk, model, optimizer)
            elif options.case.startswith("exact"):
                mode = "in_backward" if "in-backward" in options.case else "eager" if "eager" in options.case else "deferred"
                run = misa.manage(model, optimizer, budget=budget, step=mode, daemon="private", disk=options.disk,
                                  job=options.case)
            misa.memory.reset_peak()
            answer(parameters=sum(p.numel() for p in model.parameters()))
        elif command == "steps":
            seconds = []
            read, written = read_io()
            for _ in range(int(arguments[0])):
                begin = time.monotonic()
                generator = torch.Generator().manual_seed(step)
                inputs = torch.randn(options.rows, options.width, generator=generator)
                targets = torch.randn(options.rows, options.width, generator=generator)
                optimizer.zero_grad()
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                value = loss.item()
                del inputs, targets, loss
                step += 1
                seconds.append(time.monotonic() - begin)
            read_now, written_now = read_io()
            answer(seconds=seconds, loss=value, read_bytes=read_now - read, written_bytes=written_now - written,
                   device_peak_bytes=misa.memory.peak_bytes())
        elif command == "finish":
            digest = misa.state_sha256(model, optimizer)
            report = None
            if run is not None:
                report = {k: v for k, v in run.report().items() if k != "timeline"}
            answer(state_sha256=digest, report=report, steps=step)
            break
    stack.close()


if __name__ == "__main__":
    main()
