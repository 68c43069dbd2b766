"""The command `misa`, also `python -m misa`."""

from __future__ import annotations

import argparse
import sys
from typing import Sequence

_EXAMPLES = """examples:
  misa doctor                                 what is installed, what would work, how fast the disk is
  misa run --budget 8GiB train.py --epochs 3  an unchanged script within a budget
"""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="misa", description="Memory for training.", epilog=_EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    doctor = commands.add_parser("doctor", help="say what is installed and what would work here")
    from . import _doctor

    _doctor.add_arguments(doctor)
    if arguments[:1] == ["doctor"]:
        return _doctor.main(parser.parse_args(arguments))
    run = commands.add_parser("run", help="run an unchanged training script within a budget")
    from . import _run_script  # not for the doctor: it needs the extension

    _run_script.add_arguments(run)
    return _run_script.main(parser.parse_args(arguments))
