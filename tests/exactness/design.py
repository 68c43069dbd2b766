"""Which rows are run: not the full product, but every pair of a family with an optimizer, a loop with an optimizer and with a
kind of model, and all of them with each pressure on memory."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Iterable

from tests.exactness.families import FAMILIES
from tests.exactness.loops import LOOPS
from tests.exactness.optimizers import OPTIMIZERS, REFUSED

# tight: near the smallest budget that works; comfortable: more than half of plain's peak; ample: everything fits;
# stress: room for all, but everything that is not in use leaves at every touch.
PRESSURES = ("tight", "comfortable", "ample", "stress")

# Loops of which plain training itself says that it cannot: the optimizer runs a closure without gradients.
IMPOSSIBLE = {("closure", "adafactor (transformers)")}


@dataclasses.dataclass(frozen=True)
class Row:
    family: str
    optimizer: str
    loop: str
    step: str
    pressure: str

    def pairs(self) -> Iterable[tuple[str, ...]]:
        """What this row covers."""
        yield "family optimizer", self.family, self.optimizer
        yield "loop optimizer", self.loop, self.optimizer
        yield "family loop", self.family, self.loop
        yield "kind loop", FAMILIES[self.family].kind, self.loop
        for what in ("family", "optimizer", "loop"):
            yield f"{what} pressure", getattr(self, what), self.pressure
            yield f"{what} step", getattr(self, what), self.step
        yield "step pressure", self.step, self.pressure


def _possible(family: str, optimizer: str, loop: str) -> bool:
    return (loop, optimizer) not in IMPOSSIBLE and LOOPS[loop].fits(FAMILIES[family])


def rows(seed: int = 0, families: Iterable[str] = tuple(FAMILIES)) -> list[Row]:
    """The rows of the whole comparison, in an order in which every beginning is a fair sample."""
    draw = random.Random(seed)
    families = list(families)
    covered: set[tuple[str, ...]] = set()
    chosen: list[Row] = []

    def best(candidates: list[Row]) -> Row:
        draw.shuffle(candidates)
        row = max(candidates, key=lambda r: sum(pair not in covered for pair in r.pairs()))
        covered.update(row.pairs())
        chosen.append(row)
        return row

    # A handful of every kind of choice for each pair, the best of which is taken.
    pairs = [(f, o) for f in families for o in OPTIMIZERS]
    draw.shuffle(pairs)
    for family, optimizer in pairs:
        candidates = []
        for loop in LOOPS:
            if _possible(family, optimizer, loop):
                step, pressure = draw.choice(LOOPS[loop].modes), draw.choice(PRESSURES)
                candidates.append(Row(family, optimizer, loop, step, pressure))
        best(candidates)
    for loop in LOOPS:
        for optimizer in OPTIMIZERS:
            if ("loop optimizer", loop, optimizer) in covered or (loop, optimizer) in IMPOSSIBLE:
                continue
            best([Row(f, optimizer, loop, draw.choice(LOOPS[loop].modes), p)
                  for f in families for p in PRESSURES if LOOPS[loop].fits(FAMILIES[f])])
        for pressure in PRESSURES:
            if ("loop pressure", loop, pressure) not in covered:
                best([Row(f, o, loop, draw.choice(LOOPS[loop].modes), pressure)
                      for f in families for o in OPTIMIZERS if _possible(f, o, loop)])
    for kind in sorted({FAMILIES[name].kind for name in families}):
        for loop in LOOPS:
            if ("kind loop", kind, loop) not in covered:
                best([Row(f, o, loop, draw.choice(LOOPS[loop].modes), draw.choice(PRESSURES))
                      for f in families if FAMILIES[f].kind == kind for o in OPTIMIZERS if _possible(f, o, loop)])
    chosen.extend(Row(families[0], optimizer, "closure", "deferred", "comfortable") for optimizer in REFUSED)
    return chosen


def uncovered(chosen: list[Row]) -> dict[str, int]:
    """How many pairs of each kind the rows leave out, for the report."""
    covered = {pair for row in chosen for pair in row.pairs()}
    families = sorted({row.family for row in chosen})
    of_models = sorted({FAMILIES[name].kind for name in families})
    kinds: dict[str, tuple[Any, Any]] = {
        "kind loop": (of_models, LOOPS),
        "family optimizer": (families, OPTIMIZERS), "loop optimizer": (LOOPS, OPTIMIZERS), "family loop": (families, LOOPS),
        "family pressure": (families, PRESSURES), "loop pressure": (LOOPS, PRESSURES),
        "optimizer pressure": (OPTIMIZERS, PRESSURES),
    }
    return {kind: sum((kind, a, b) not in covered for a in first for b in second) for kind, (first, second) in kinds.items()}
