"""One side of the observer benchmark: a transformer of width 1024, plain or managed with everything resident.

Reads `steps N`, `operators N` and `finish` from standard input; answers each with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

import misa
from demo.model import LanguageModel, ModelConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("plain", "managed"), required=True)
    parser.add_argument("--step", default="deferred")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    sequence = 256
    config = ModelConfig(vocabulary=512, width=1024, depth=options.layers, heads=16, context=sequence, checkpointing=False)
    model = LanguageModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    if options.side == "managed":
        misa.manage(model, optimizer, budget="16GiB", daemon="private", step=options.step)
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "finish":
            break
        if command == "operators":
            print(json.dumps({"nanoseconds": misa._C.operator_nanoseconds(int(arguments[0]))}), flush=True)
            continue
        seconds, cpu_seconds = [], []
        for number in range(int(arguments[0])):
            begin, cpu_begin = time.monotonic(), time.process_time()
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, 512, (options.tokens // sequence, sequence + 1), generator=generator)
            optimizer.zero_grad()
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, 512), tokens[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            del logits, loss
            seconds.append(time.monotonic() - begin)
            cpu_seconds.append(time.process_time() - cpu_begin)
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds}), flush=True)


if __name__ == "__main__":
    main()
