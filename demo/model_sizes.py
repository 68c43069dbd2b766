"""The demo's model in three sizes, as keyword arguments of ModelConfig; apart from it, so that torch is not needed here."""

_COMMON = {"vocabulary": 4096, "context": 256, "checkpointing": True}

SIZES = {
    # A few seconds a run: for tests.
    "tiny": {**_COMMON, "vocabulary": 1024, "width": 256, "depth": 4, "heads": 4, "context": 64},
    # 27 million parameters, 440 MB of training state.
    "standard": {**_COMMON, "width": 512, "depth": 8, "heads": 8},
    # 126 million parameters, 2 GB of training state.
    "large": {**_COMMON, "width": 1024, "depth": 10, "heads": 16},
}
