"""What the fault door costs: a read and a first write by raw pointer, beside a touch by an operator, for a present and an away
tensor.

    python -m tests.bench.doors [--mib 16]

Prefaulting aside, an away read is a load on demand; what the door adds is the difference to the operator's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Callable

import torch

import misa
from tests.bench.report import ROOT, write_report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=16, help="size of the tensor")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = torch.nn.Linear(1024, options.mib * 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = []
    with misa.manage(model, optimizer, budget="4GiB", daemon="private") as run, torch.no_grad():
        weight = model.weight
        array = weight.detach().numpy()
        row = weight[0]

        def case(name: str, before: Callable[[], object], work: Callable[[], object]) -> None:
            seconds = []
            for _ in range(options.rounds):
                before()
                begin = time.perf_counter()
                work()
                seconds.append(time.perf_counter() - begin)
            rows.append({"case": name, "bytes": weight.numel() * 4, "seconds_median": statistics.median(seconds),
                         "seconds_least": min(seconds)})
            print(f"  {name}: {statistics.median(seconds) * 1e6:.1f} us (least {min(seconds) * 1e6:.1f})", flush=True)

        def away() -> None:
            assert run.unload_all()

        def clean() -> None:
            away()
            row.sum()

        case("present, read by operator", lambda: row.sum(), lambda: row.sum())
        case("present, read by pointer", lambda: row.sum(), lambda: array[0, 0].item())
        case("away, read by operator", away, lambda: row.sum())
        case("away, read by pointer", away, lambda: array[0, 0].item())
        case("clean, first write by operator", clean, lambda: row.zero_())
        case("clean, first write by pointer", clean, lambda: array.__setitem__((0, 0), 0))
    print(f"Written to {write_report('doors', rows).relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
