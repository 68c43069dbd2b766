"""misa: a daemon owns the memory of training state, one line manages a model.

    import misa
    with misa.manage(model, optimizer, budget="24GiB", mode="exact"):
        ...the same training loop...

Importing the package installs the memory meter: from then on every CPU tensor counts in ``misa.memory``.
"""

from __future__ import annotations

import torch as _torch

try:
    from . import _C
except ImportError as error:  # the usual reason is another torch than the one it was built for
    raise ImportError(
        f"misa's extension does not load with torch {_torch.__version__}: {error}. Build misa again for this torch "
        "(make build)."
    ) from error

if _C.torch_version != _torch.__version__:
    raise ImportError(
        f"misa was built for torch {_C.torch_version}, but torch {_torch.__version__} is installed: build misa again for "
        "it (make build), or install the other torch. Nothing was changed."
    )

_C.install_meter()

from . import emulated, memory  # noqa: E402
from ._manage import Run, current_run, manage, resident  # noqa: E402
from ._sampling import Sampled, SampledReference  # noqa: E402
from ._state import state_sha256  # noqa: E402
from .emulated import Emulated  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "Emulated",
    "Run",
    "Sampled",
    "SampledReference",
    "current_run",
    "emulated",
    "manage",
    "memory",
    "resident",
    "state_sha256",
]
