"""Tasks: named parts of one training that take turns, each with an importance of its own for every module."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any, Iterator, Mapping

from . import _C


class Tasks:
    """The tasks of one training, and which of them runs now."""

    def __init__(self, declared: Mapping[str, float] | None = None) -> None:
        self._table = _C.TaskTable()
        if declared is not None:
            if not declared:
                raise ValueError("tasks= names no task: leave it out where there are none. Nothing was changed.")
            for name, weight in declared.items():
                self._table.enter(_name(name), _weight(name, weight))
            self._table.close()
        self._declared = declared is not None
        self._running: str | None = None

    @property
    def now(self) -> tuple[str, float]:
        """Name and weight of the task that runs; "" for none."""
        if self._running is None:
            return "", 1.0
        return self._running, self._weights()[self._running]

    def _weights(self) -> dict[str, float]:
        return {name: weight for name, weight, _, _ in self._table.tasks()}

    @contextlib.contextmanager
    def run(self, name: str, weight: float | None) -> Iterator[None]:
        name = _name(name)
        if self._running is not None:
            raise ValueError(
                f"Task {name!r} would begin inside task {self._running!r}, and a step belongs to one task: leave the one before the "
                "other begins. Nothing was changed."
            )
        if weight is None:
            weight = self._weights().get(name, 1.0)
        self._table.enter(name, _weight(name, weight))
        self._running = name
        try:
            yield
        finally:
            self._running = None

    def end_step(self) -> tuple[str, float]:
        """Counts a step for the task that runs, which it gives."""
        self._table.count_step(self._running or "")
        return self.now

    def report(self) -> list[dict[str, Any]]:
        """Each task's name, weight, share of the whole by weight, and steps; nothing where none was named."""
        tasks = self._table.tasks()
        if len(tasks) == 1:
            return []
        return [
            {"name": name, "weight": weight, "share": share, "steps": steps}
            for name, weight, share, steps in tasks
            if name or steps
        ]

    def state(self) -> list[tuple[str, float, int]]:
        """For a resume; nothing where no task was named."""
        tasks = self._table.tasks()
        return [(name, weight, steps) for name, weight, _, steps in tasks] if len(tasks) > 1 else []

    def check_state(self, state: Any) -> list[tuple[str, float, int]]:
        """What `state()` gave; ValueError where it is damaged, or names a task that this training does not have."""
        try:
            saved = [(str(name), float(weight), int(steps)) for name, weight, steps in state]
            if any(steps < 0 for _, _, steps in saved):
                raise ValueError
        except (TypeError, ValueError):
            raise ValueError("The saved tasks are damaged: they are no list of names, weights and steps. Nothing was changed.") from None
        if self._declared and (unknown := [name for name, _, _ in saved if name not in self._weights()]):
            raise ValueError(
                f"The saved run has the task {unknown[0]!r}, and tasks= of this one does not name it. Nothing was changed."
            )
        _C.TaskTable().assign(saved)
        return saved

    def load_state(self, state: Any) -> None:
        """Raises as `check_state`, with nothing changed."""
        saved = self.check_state(state)
        if self._declared:
            # Those that are named here and were not saved keep their places behind the others.
            known = {name for name, _, _ in saved}
            saved = saved + [(name, weight, 0) for name, weight in self._weights().items() if name not in known]
        if saved:
            self._table.assign(saved)


def _name(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError(f"A task's name is text, and this one is {name!r}. Nothing was changed.")
    if not name:
        raise ValueError("A task needs a name, and this one is empty. Nothing was changed.")
    return name


def _weight(name: str, weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, numbers.Real):
        raise ValueError(f"The weight of task {name!r} is {weight!r}, and must be a number. Nothing was changed.")
    return float(weight)


# Where no run and no reference is open: a loop that names its tasks runs unchanged.
_none = Tasks()
_open: Tasks | None = None


def take_over(tasks: Tasks) -> None:
    """`task` speaks to these from now on."""
    global _open
    _open = tasks


def let_go(tasks: Tasks) -> None:
    """Unless others have taken over, `task` speaks to nobody."""
    global _open
    if _open is tasks:
        _open = None


@contextlib.contextmanager
def task(name: str, weight: float | None = None) -> Iterator[None]:
    """What is trained inside the context is this task's: a step belongs to the task inside which `optimizer.step()` is called.

    Each task has an importance of its own for every module. Where modules are weighed for the whole training (the draws of
    mode "sampled", `misactl modules`), the tasks' importances count by weight. Mode "exact" trains the same bits whatever is
    named. Without a run the context does nothing.

    Args:
        name: up to 64 bytes of text; a training has up to 16 tasks.
        weight: how much the task counts beside others, above 0 and up to 1000; from now on. Where it is left out the task
            keeps the one that it has, and begins with 1.

    Raises:
        ValueError: a name or weight that is none, a task inside another, one too many, or one that `tasks=` of `misa.manage`
            does not name. Nothing was changed.
    """
    with (_open or _none).run(name, weight):
        yield
