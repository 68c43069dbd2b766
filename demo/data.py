"""Real English text as tokens: the King James Version from the distribution's package bible-kjv."""

import json
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# Words with the blank before them, runs of white space, and single other characters; together they are the whole text.
_PIECE = re.compile(r" ?[A-Za-z']+|\s+|.", re.DOTALL)
_BYTES = 256


class DataError(Exception):
    """The text is not there; the message says what to install."""


@dataclass(frozen=True)
class Corpus:
    name: str
    text_bytes: int
    vocabulary: int
    tokens: np.ndarray  # uint16


def read_text() -> str:
    """Returns the text, a verse a line."""
    try:
        result = subprocess.run(
            ["bible", "-f", "gen1:1-rev22:21"], capture_output=True, timeout=60, check=True, encoding="latin-1"
        )
    except FileNotFoundError:
        raise DataError(
            "the program `bible` is missing, from which the demo takes its text; run `make setup`, "
            "or install the packages bible-kjv and bible-kjv-text."
        ) from None
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise DataError(f"the program `bible` could not print its text ({error}); is bible-kjv-text installed?") from None
    if len(result.stdout) < 1_000_000:
        raise DataError("the program `bible` printed less than the whole text; reinstall bible-kjv-text.")
    # A verse starts with its place, "Ge1:1 ".
    return re.sub(r"^\S+ ", "", result.stdout, flags=re.MULTILINE)


def build_vocabulary(text: str, size: int) -> list[str]:
    """Returns the most frequent pieces of the text; those that are not among them are spelt in bytes."""
    counts = Counter(piece for piece in _PIECE.findall(text) if len(piece) > 1)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [piece for piece, _ in ranked[: size - _BYTES]]


def encode(text: str, vocabulary: list[str]) -> np.ndarray:
    """Returns the tokens of a text: a byte is its own value, a piece of the vocabulary its place after the bytes."""
    place = {piece: _BYTES + index for index, piece in enumerate(vocabulary)}
    tokens: list[int] = []
    for piece in _PIECE.findall(text):
        known = place.get(piece)
        if known is not None:
            tokens.append(known)
        else:
            tokens.extend(piece.encode("utf-8"))
    return np.asarray(tokens, dtype=np.uint16)


def decode(tokens: np.ndarray, vocabulary: list[str]) -> str:
    """The inverse of encode."""
    pieces = [bytes([t]) if t < _BYTES else vocabulary[t - _BYTES].encode("utf-8") for t in map(int, tokens)]
    return b"".join(pieces).decode("utf-8")


def prepare(folder: Path, size: int) -> Corpus:
    """Writes tokens.npy and corpus.json into the folder, for the runs to read."""
    text = read_text()
    vocabulary = build_vocabulary(text, size)
    tokens = encode(text, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", tokens)
    corpus = Corpus("bible-kjv", len(text.encode("utf-8")), size, tokens)
    description = {"name": corpus.name, "bytes": corpus.text_bytes, "vocabulary": size, "pieces": vocabulary}
    (folder / "corpus.json").write_text(json.dumps(description), encoding="utf-8")
    return corpus
