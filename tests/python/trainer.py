"""A trainer as a process of its own: `python -m tests.python.trainer JSON`. Says on stdout what it does, a line each."""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import signal
import sys
import time
from typing import Any

import misa
import torch

from tests.python.models import Transformer, loss_of


def say(*words: Any) -> None:
    print(*words, flush=True)


# Started from a background job, a process ignores the interrupt key; here it is a test that presses it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = Transformer(**settings.get("model", {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    manage: Any = contextlib.nullcontext()
    if settings.get("manage") is not None:
        manage = misa.manage(model, optimizer, **settings["manage"])
        say("managed", json.dumps(manage.session()))
    hang_at = settings.get("hang_at", -1)

    def hang(*_: Any) -> None:
        say("hangs")
        time.sleep(3600)

    with manage as run:
        # A trainer without a number of steps goes on until a line comes on its stdin.
        for step in range(settings["steps"]) if "steps" in settings else itertools.count():
            if "steps" not in settings and select.select([sys.stdin], [], [], 0)[0]:
                say("steps", step)
                break
            if step == hang_at:
                model.blocks[1].up.weight.register_hook(hang)
            optimizer.zero_grad()
            rows = settings["more_rows"] if step >= settings.get("more_from", step + 1) else 4
            loss_of(model, step, rows).backward()
            optimizer.step()
            say("step", step)
            if step == settings.get("wait_at", -1):
                sys.stdin.readline()
            time.sleep(settings.get("pause", 0))
        say("sha256", misa.state_sha256(model, optimizer))
        say("peak", misa.memory.peak_bytes())
        if run is not None:
            say("alive", run.daemon_alive())
    if run is not None:
        run.release()
    say("released")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
