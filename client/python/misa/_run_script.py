"""`misa run`: an unchanged training script under a budget.

From the first line on every parameter that the script makes goes behind misa's pool. At the first `backward()` the
optimizers and the models that own their parameters are known, and the run begins.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import runpy
import sys
import weakref
from pathlib import Path
from typing import Any, Callable

import torch
from torch.optim import Optimizer

from . import _C, _manage
from ._creation import empty_init
from ._manage import manage
from ._sampling import Sampled


def say(text: str) -> None:
    print(f"misa: {text}", file=sys.stderr, flush=True)


class CannotManage(SystemExit):
    """Ends the script with a sentence."""

    def __init__(self, text: str) -> None:
        super().__init__(3)
        say(text)


def owners_of(parameters: list[torch.Tensor]) -> tuple[list[torch.nn.Module], list[torch.Tensor]]:
    """The outermost modules that own the parameters, and the parameters that no module owns."""
    # By type: some objects answer isinstance() with a warning.
    modules = [m for m in gc.get_objects() if issubclass(type(m), torch.nn.Module)]
    inner = {id(child) for module in modules for child in module.__dict__.get("_modules", {}).values() if child is not None}
    missing = {id(p): p for p in parameters}
    outermost = [(m, {id(p) for p in m.parameters()}) for m in modules if id(m) not in inner and "_modules" in m.__dict__]
    chosen: list[torch.nn.Module] = []
    while missing:
        # The one that has most of them; of equals the one with the fewest others beside.
        best = max(outermost, key=lambda one: (len(one[1] & missing.keys()), -len(one[1])), default=None)
        if best is None or not best[1] & missing.keys():
            break
        chosen.append(best[0])
        for known in best[1]:
            missing.pop(known, None)
    return chosen, list(missing.values())


class ScriptRun:
    """Watches a script and manages what it trains."""

    def __init__(self, options: dict[str, Any], or_plain: bool) -> None:
        self._options = options
        self._or_plain = or_plain
        self._plain = False
        self._optimizers: list[weakref.ref[Optimizer]] = []
        self._late: set[int] = set()
        self._pid = os.getpid()
        self._run: _manage.Run | None = None
        self._making: empty_init | None = None

    def __enter__(self) -> ScriptRun:
        making = {key: value for key, value in self._options.items() if key != "step"}
        self._making = empty_init(**making)
        self._making.__enter__()
        self._init, self._backward = Optimizer.__init__, torch.autograd.backward

        @functools.wraps(self._init)
        def init(optimizer: Optimizer, *arguments: Any, **options: Any) -> None:
            self._init(optimizer, *arguments, **options)
            self._made(optimizer)

        @functools.wraps(self._backward)
        def backward(*arguments: Any, **options: Any) -> None:
            if self._run is None and not self._plain and os.getpid() == self._pid:
                self._begin()
            self._backward(*arguments, **options)

        Optimizer.__init__ = init  # type: ignore[method-assign]
        torch.autograd.backward = backward  # type: ignore[assignment]
        return self

    def _made(self, optimizer: Optimizer) -> None:
        if self._run is not None and os.getpid() == self._pid:
            say(f"{type(optimizer).__name__} was made after the training began: it is not managed, and its steps run as torch's "
                "own, with all that each of their operators needs at once.")
        self._optimizers.append(weakref.ref(optimizer))

    def _stop_making(self) -> None:
        if self._making is not None:
            self._making.__exit__(None, None, None)
            self._making = None

    def _begin(self) -> None:
        if _manage._current is not None:  # the script does it itself
            self._run = _manage._current
            self._stop_making()
            return
        optimizers = [o for o in (reference() for reference in self._optimizers) if o is not None]
        if not optimizers:
            return  # gradients for something else; an optimizer may still come
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        models, loose = owners_of(parameters)
        try:
            if loose:
                raise ValueError(
                    f"{len(loose)} of the tensors that are trained, the first of shape {tuple(loose[0].shape)}, belong to no "
                    "torch.nn.Module."
                )
            self._stop_making()
            self._run = manage(models, optimizers, **self._options)
        except (ValueError, RuntimeError) as error:
            if not self._or_plain:
                raise CannotManage(f"this script's training cannot be managed: {error} Nothing was trained. With --or-plain the "
                                   "script would run without misa.") from None
            say(f"this script's training cannot be managed, so it runs without misa and without a budget: {error}")
            self._plain = True
            self._give_back()
            return
        names = " and ".join(type(m).__name__ for m in models)
        report = self._run.report()
        say(f"manages {names} ({report['parameter_count']:,} parameters in {report['module_count']} modules) and "
            f"{' and '.join(type(o).__name__ for o in optimizers)} within {_C.format_byte_size(self._run.budget_bytes)}, mode "
            f"{self._run.mode}, step {report['step_mode']}.")

    def _give_back(self) -> None:
        self._stop_making()
        growing = _manage._growing
        if growing is not None:
            growing.manager.release_all()
            _manage._growing = None

    def __exit__(self, kind: Any, value: Any, trace: Any) -> None:
        if os.getpid() != self._pid:
            return
        Optimizer.__init__ = self._init  # type: ignore[method-assign]
        torch.autograd.backward = self._backward  # type: ignore[assignment]
        if self._making is not None:
            self._making.__exit__(kind, value, trace)
        if kind is not None and not issubclass(kind, SystemExit):
            return
        if self._run is None:
            if not self._plain and value is None:
                say("the script has trained nothing: there was no backward() with an optimizer.")
            return
        if self._run.is_managing():
            self._run.flush()
        report = self._run.report()
        say(f"{report['steps']} steps, {report['step_seconds_median']:.3f} s each of which {report['stall_seconds_median']:.3f} s "
            f"waiting; peak {_C.format_byte_size(report['device_peak_bytes'])} of "
            f"{_C.format_byte_size(report['budget_bytes'])}.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--budget", required=True, help="bytes this trainer may hold at once: 8GiB, 800MiB or a number")
    parser.add_argument("--mode", choices=("exact", "sampled"), default="exact", help="default: exact")
    parser.add_argument("--step", choices=("deferred", "in_backward", "eager"), default="deferred", help="default: deferred")
    parser.add_argument("--daemon", choices=("auto", "required", "private"), default="auto", help="default: auto")
    parser.add_argument("--runtime-dir", metavar="FOLDER", help="of the daemon's sockets")
    parser.add_argument("--disk", metavar="FOLDER", help="of a private daemon's disk tier")
    parser.add_argument("--chunk-bytes", type=int, default=0, help=argparse.SUPPRESS)
    sampling = parser.add_argument_group("mode sampled")
    defaults = Sampled()
    sampling.add_argument("--delta", type=float, default=defaults.delta, help=f"share trained in a round, {defaults.delta}")
    sampling.add_argument("--eta", type=float, default=defaults.eta, help=f"temperature of the draws, {defaults.eta}")
    sampling.add_argument("--alpha", type=float, default=defaults.alpha, help=f"smoothing of the importance, {defaults.alpha}")
    sampling.add_argument("--inner-steps", type=int, default=defaults.inner_steps, help=f"steps of a round, {defaults.inner_steps}")
    sampling.add_argument("--seed", type=int, default=defaults.seed, help=f"of the draws, {defaults.seed}")
    sampling.add_argument("--always", action="append", default=[], metavar="KIND", help="trained in every round; repeatable")
    parser.add_argument("--or-plain", action="store_true", help="a script that cannot be managed runs without misa")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module, as with python -m")
    parser.add_argument("script", help="the training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")


def main(arguments: argparse.Namespace) -> int:
    sampled = Sampled(arguments.delta, arguments.eta, arguments.alpha, arguments.inner_steps, arguments.seed,
                      tuple(arguments.always))
    if not arguments.module and not Path(arguments.script).is_file():
        say(f"there is no script {arguments.script}.")
        return 2
    options = {
        "budget": arguments.budget,
        "mode": arguments.mode,
        "step": arguments.step,
        "sampled": sampled if arguments.mode == "sampled" else None,
        "daemon": arguments.daemon,
        "runtime_dir": arguments.runtime_dir,
        "disk": arguments.disk,
        "chunk_bytes": arguments.chunk_bytes,
        "job": Path(arguments.script).name,
    }
    run: Callable[[], Any]
    if arguments.module:
        sys.path.insert(0, os.getcwd())
        run = functools.partial(runpy.run_module, arguments.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(arguments.script).resolve().parent))
        run = functools.partial(runpy.run_path, arguments.script, run_name="__main__")
    sys.argv = [arguments.script, *arguments.arguments]
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(ScriptRun(options, arguments.or_plain))
        except (ValueError, RuntimeError) as error:
            say(str(error))
            return 2
        run()
    return 0
