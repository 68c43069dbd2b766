"""Runs rows, one JSON object a line in and out: `python -m tests.exactness.worker`."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path


def main() -> None:
    # What libraries print must not get between the lines.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"

    import torch

    from tests.exactness.design import Row
    from tests.exactness.run_row import forget_the_past, run_row
    from tests.python.processes import Misad

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="misa-x-", dir="/tmp") as folder, Misad(Path(folder)) as misad:
        for text in sys.stdin:
            row = Row(**json.loads(text))
            try:
                line = run_row(row, misad)
            except Exception as error:
                line = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-12)}
                print(json.dumps(line), file=answers, flush=True)
                return  # a fresh process for the next row
            forget_the_past()
            print(json.dumps(line), file=answers, flush=True)


if __name__ == "__main__":
    main()
