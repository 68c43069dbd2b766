"""misa: a daemon owns the memory of training state, one line manages a model.

    import misa
    with misa.manage(model, optimizer, budget="24GiB", mode="exact"):
        ...the same training loop...

Importing the package installs the memory meter: from then on every CPU tensor counts in ``misa.memory``.
"""

from __future__ import annotations

import os as _os
import sys as _sys

__version__ = "0.1.0"

# Why the package is of no use here, for the doctor alone; everybody else gets it as the ImportError it is.
import_error: str | None = None


def _doctor_asks() -> bool:
    words = _sys.orig_argv
    module = any(words[i : i + 3] == ["-m", "misa", "doctor"] for i in range(len(words)))
    return module or (_os.path.basename(_sys.argv[0] or "") == "misa" and _sys.argv[1:2] == ["doctor"])


def _check_extension() -> None:
    import torch

    try:
        from . import _C
    except ImportError as error:  # the usual reason is another torch than the one it was built for
        raise ImportError(
            f"misa's extension does not load with torch {torch.__version__}: {error}. Build or install misa again for this "
            "torch (make build, or pip install --force-reinstall misa)."
        ) from error
    if _C.torch_version != torch.__version__:
        raise ImportError(
            f"misa was built for torch {_C.torch_version}, but torch {torch.__version__} is installed: build misa again for "
            "it (make build), or install the other torch. Nothing was changed."
        )


try:
    _check_extension()
except ImportError as _error:
    if not _doctor_asks():
        raise
    import_error = str(_error)
else:
    from . import _C, emulated, memory

    _C.install_meter()

    from ._checkpoint import load, load_weights, save
    from ._creation import empty_init, from_safetensors
    from ._manage import Run, current_run, manage, resident, step_bound
    from ._sampling import Sampled, SampledReference
    from ._state import state_sha256
    from ._tasks import task
    from .emulated import Emulated

__all__ = [
    "Emulated",
    "Run",
    "Sampled",
    "SampledReference",
    "current_run",
    "empty_init",
    "emulated",
    "from_safetensors",
    "load",
    "load_weights",
    "manage",
    "memory",
    "resident",
    "save",
    "state_sha256",
    "step_bound",
    "task",
]
