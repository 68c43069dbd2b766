"""Module-wise importance sampling, for managed runs and for the plain loop they are compared with."""

from __future__ import annotations

import dataclasses
import sys
from types import TracebackType
from typing import Any, Callable, Mapping, Sequence

import torch
from torch.optim import Optimizer

from . import _C
from ._tasks import Tasks, let_go, take_over
from ._wrappers import world_size

# (module, sum, sum of squares, elements)
Statistics = tuple[int, float, float, int]


@dataclasses.dataclass(frozen=True)
class Sampled:
    """Options of mode "sampled".

    Attributes:
        delta: share of the samplable parameters (the matrices inside blocks) that a round trains, in (0, 1].
        eta: temperature of the softmax over importance; 0 draws uniformly.
        alpha: weight of a round's mean in the importance G <- (1 - alpha) G + alpha mean, in (0, 1].
        inner_steps: optimizer steps of a round (T).
        seed: of the draws.
        always: kinds or names of modules that are trained in every round besides ("expert", "embedding", "head", "norm", …;
            "norm" has the small tensors that ride with their block in it). They do not count in delta.
        needs: pairs of modules by name; the first is drawn only together with the second, and with all that that needs.
        apart: pairs of modules by name that no round trains together.
        wait_for_stable_loss: every module is trained until the loss that `step_loss` is told is stable; only then the first
            round begins, and what it does not train leaves as at a round's end.
        stable_window: losses that are looked at for that; the means of their halves are compared.
        stable_tolerance: how far these may be apart, relative to the loss or to the way it has come.
        stable_hold: steps in a row for which that must hold.
        count_micro_batches: a step of n accumulated micro-batches counts as n steps of its round (up to 8), so that draws stay
            as dense in the data as without accumulation.
    """

    delta: float = 0.03
    eta: float = 1.0
    alpha: float = 0.1
    inner_steps: int = 50
    seed: int = 0
    always: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()
    wait_for_stable_loss: bool = False
    stable_window: int = 50
    stable_tolerance: float = 0.05
    stable_hold: int = 10
    count_micro_batches: bool = False

    def options(self) -> _C.SamplerOptions:
        return _C.SamplerOptions(self.delta, self.eta, self.alpha, self.inner_steps, self.seed, list(self.needs),
                                 list(self.apart))


class StepLoss:
    """The loss of the step that is under way: of several micro-batches their mean."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._rows = 0

    def add(self, loss: torch.Tensor | float, rows: int) -> None:
        if rows < 0:
            raise ValueError(f"A batch of {rows} rows makes no sense.")
        self._losses.append(float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss))
        self._rows = max(self._rows, int(rows))

    def take(self) -> tuple[float | None, int]:
        """The loss, None where none came, and the rows of the largest micro-batch; both begin anew."""
        losses, rows = self._losses, self._rows
        self._losses, self._rows = [], 0
        return (sum(losses) / len(losses) if losses else None), rows


class SamplingDriver:
    """Draws the rounds and applies them: `requires_grad`, the extra momentum step at a round's end, cleared state.

    The same code drives a managed run and the plain reference; they differ in who takes the statistics and in when the
    end of a round is carried out.
    """

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]], optimizers: Sequence[Optimizer], options: Sampled) -> None:
        self._options = options
        self._optimizers = list(optimizers)
        self._groups = _C.group_parameters(list(named))
        tensors = [tensor for _, tensor in named]
        self._parameters = [[tensors[i] for i in indices] for _, _, _, indices in self._groups]
        self._samplable = [i for i, (_, _, samplable, _) in enumerate(self._groups) if samplable]
        if not self._samplable:
            raise ValueError(
                "Mode sampled found no matrices inside numbered blocks (like \"blocks.3.ffn.up.weight\") to choose from. "
                "Nothing was changed."
            )
        self._sampler = self._make_sampler()
        self._always = [i for i, (name, kind, _, _) in enumerate(self._groups)
                        if _C.is_pinned(name, kind, list(options.always))]
        self._stability = self._make_stability()
        self._waits = options.wait_for_stable_loss
        self._waited_steps = 0
        self._told_problem = False
        # Of the step that ended last: as how many steps of the round it counted, and whether the sampler stood still.
        self.counted_steps = 1
        self.waited = False
        self._before = [(p, p.requires_grad) for parameters in self._parameters for p in parameters]
        self._trainable = {id(p) for p, required in self._before if required}

    def _make_sampler(self) -> _C.ModuleSampler:
        return _C.ModuleSampler(
            self._options.options(),
            [(self._groups[i][0], sum(p.numel() for p in self._parameters[i])) for i in self._samplable],
        )

    def _make_stability(self) -> _C.LossStability:
        return _C.LossStability(self._options.stable_window, self._options.stable_tolerance,
                                 self._options.stable_hold)

    @property
    def round(self) -> int:
        return self._sampler.round()

    @property
    def digest(self) -> int:
        return self._sampler.digest()

    @property
    def active_modules(self) -> list[int]:
        """Indices of the modules this round trains, in registration order."""
        if self._waits:
            return list(range(len(self._groups)))
        return sorted({self._samplable[i] for i in self._sampler.active()} | set(self._always))

    def begin(self) -> None:
        self._apply()

    def tasks(self) -> list[tuple[str, float, int]]:
        """Name and weight of the tasks whose steps it has seen, and for each a number above 0 where there were any."""
        return self._sampler.tasks()

    def serialized(self) -> bytes:
        """The sampler's whole state."""
        return self._sampler.serialize()

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "options": dataclasses.asdict(self._options),
            "sampler": torch.frombuffer(bytearray(self._sampler.serialize()), dtype=torch.uint8),
        }
        if self._options.wait_for_stable_loss:
            state["stability"] = torch.tensor(self._stability.save(), dtype=torch.float64)
            state["waits"] = self._waits
        return state

    def check_state_dict(self, state: Any) -> bytes:
        """The sampler's state in it; ValueError where it is damaged or of other modules or options."""
        try:
            always, sampler = tuple(state["options"]["always"]), bytes(state["sampler"].tolist())
        except (TypeError, KeyError, AttributeError):
            raise ValueError("The saved state has no sampler in it. Nothing was changed.") from None
        if always != tuple(self._options.always):
            raise ValueError(
                f"The saved run always trained the kinds {always}, and this one {tuple(self._options.always)}. Nothing was "
                "changed."
            )
        self._make_sampler().restore(sampler)
        waiting = self._options.wait_for_stable_loss
        for name in ("wait_for_stable_loss", "count_micro_batches",
                     *(("stable_window", "stable_tolerance", "stable_hold") if waiting else ())):
            theirs, mine = state["options"].get(name, getattr(Sampled, name)), getattr(self._options, name)
            if theirs != mine:
                raise ValueError(f"The saved run had {name}={theirs}, and this one has {name}={mine}. Nothing was changed.")
        if waiting:
            try:
                saved = [float(v) for v in state["stability"].tolist()]
                bool(state["waits"])
            except (TypeError, KeyError, AttributeError):
                raise ValueError("The saved state has no judgement of the loss in it. Nothing was changed.") from None
            self._make_stability().restore(saved)
        return sampler

    def load_state_dict(self, state: Any) -> None:
        """Raises as `check_state_dict`, with nothing changed."""
        self._sampler.restore(self.check_state_dict(state))
        if self._options.wait_for_stable_loss:
            self._stability.restore([float(v) for v in state["stability"].tolist()])
            self._waits = bool(state["waits"])
        self._apply()

    def end(self) -> None:
        """Puts `requires_grad` back as it was."""
        for parameter, required in self._before:
            parameter.requires_grad_(required)

    def _apply(self) -> None:
        active = set(self.active_modules)
        for i, parameters in enumerate(self._parameters):
            for parameter in parameters:
                if id(parameter) in self._trainable:
                    parameter.requires_grad_(i in active)

    def end_step(self, statistics: Sequence[Statistics], defer: Callable[[int, Callable[[], None]], None],
                 loss: float | None = None, micro_batches: int = 1, task: tuple[str, float] = ("", 1.0)) -> None:
        """Folds one step's statistics in; at the end of a round hands what has to happen to each module to `defer`.

        `loss` and `micro_batches` are the step's, for the guards that were chosen; `task` is the one that it belongs to.
        """
        # Modules that came later have no part in the draws.
        statistics = [s for s in statistics if s[0] < len(self._groups)]
        statistics, loss, micro_batches = self._of_all_ranks(statistics, loss, micro_batches)
        self.counted_steps = _C.counted_steps(micro_batches) if self._options.count_micro_batches else 1
        self.waited = self._waits
        if self._waits:
            self._wait(loss)
            if self._waits:
                return
            # What was trained until now ends as a round does; what the first round does not train leaves.
            before = [i for i in range(len(self._groups)) if i not in self._always]
        else:
            place = {module: i for i, module in enumerate(self._samplable)}
            before = [self._samplable[i] for i in self._sampler.active()]
            for module, total, squares, count in statistics:
                if module in place and module in before:
                    self._sampler.observe(place[module], total, squares, count)
            if not self._sampler.end_step(self.counted_steps, *task):
                return
        after = set(self.active_modules)
        for module in before:
            # The options of this moment: a scheduler may change them before a deferred end is carried out.
            ends = self._momentum_options(module)
            leaves = module not in after
            defer(module, lambda ends=ends, leaves=leaves: self._end_round(ends, leaves))
        self._apply()
        for module in before:
            if module not in after:
                for parameter in self._parameters[module]:
                    parameter.grad = None

    def _wait(self, loss: float | None) -> None:
        """Looks at one more loss while sampling waits for it to be stable."""
        self._waited_steps += 1
        if loss is not None:
            problem = self._stability.observe(loss)
            if problem and not self._told_problem:
                print(f"misa: {problem}", file=sys.stderr)
            self._told_problem = bool(problem)
            self._waits = not self._stability.stable()
        elif self._waited_steps == self._options.stable_window and self._stability.observed() == 0:
            print(f"misa: mode sampled waits for a stable loss, and none of {self._waited_steps} steps told one: call "
                  "step_loss(loss) before optimizer.step(). Until then every module is trained.", file=sys.stderr)

    def _of_all_ranks(self, statistics: Sequence[Statistics], loss: float | None,
                      micro_batches: int) -> tuple[Sequence[Statistics], float | None, int]:
        """In a distributed job the sums over all processes, the mean loss and the most micro-batches, so that every one draws
        the same sets; a digest of what has been drawn so far is compared on the way."""
        ranks = world_size()
        if ranks == 1:
            return statistics, loss, micro_batches
        mine = torch.zeros(len(self._groups) + 2, 3, dtype=torch.float64)
        mine[-2] = torch.tensor([0.0 if loss is None else loss, float(loss is not None), float(micro_batches)],
                                dtype=torch.float64)
        for module, total, squares, count in statistics:
            mine[module] = torch.tensor([total, squares, float(count)], dtype=torch.float64)
        # 32 bits at a time: a double holds them exactly.
        digest = self._sampler.digest()
        mine[-1] = torch.tensor([digest & 0xFFFFFFFF, digest >> 32, 0], dtype=torch.float64)
        theirs = [torch.empty_like(mine) for _ in range(ranks)]
        torch.distributed.all_gather(theirs, mine)
        different = [rank for rank, one in enumerate(theirs) if not torch.equal(one[-1], mine[-1])]
        if different:
            raise RuntimeError(
                f"Rank {torch.distributed.get_rank()} and rank {different[0]} have drawn different modules to train: their "
                "options, seeds, models or tasks differ, or one went on alone. What was trained up to here differs between them; "
                "go back to the last checkpoint."
            )
        # In the order of ranks, so that the sum is the same everywhere.
        total = theirs[0][:-1].clone()
        for one in theirs[1:]:
            total += one[:-1]
        told = float(total[-1, 1])
        loss = float(total[-1, 0]) / told if told else None
        micro_batches = max(int(one[-2, 2]) for one in theirs)
        return ([(module, float(s), float(q), int(n)) for module, (s, q, n) in enumerate(total[:-1].tolist()) if n],
                loss, micro_batches)

    def _momentum_options(self, module: int) -> list[tuple[Optimizer, torch.Tensor, float, float, float]]:
        """(optimizer, parameter, lr, beta1, eps) of the module's parameters; beta1 and eps are 0 where there are none."""
        found = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                members = {id(p) for p in group["params"]}
                for parameter in self._parameters[module]:
                    if id(parameter) in members:
                        beta1 = float(group["betas"][0]) if "betas" in group else 0.0
                        found.append((optimizer, parameter, float(group["lr"]), beta1, float(group.get("eps", 0.0))))
        return found

    @torch.no_grad()
    def _end_round(self, ends: list[tuple[Optimizer, torch.Tensor, float, float, float]], leaves: bool) -> None:
        """The paper's last step of a round, theta -= lr * beta1 / (1 - beta1) * m / sqrt(v + eps) (arXiv 2511.00056), for
        optimizers that keep Adam's moments; then the state of a module that leaves is cleared."""
        for optimizer, parameter, lr, beta1, eps in ends:
            state = optimizer.state.get(parameter)
            if not state:
                continue
            if "exp_avg" in state and "exp_avg_sq" in state:
                second = state.get("max_exp_avg_sq", state["exp_avg_sq"])
                denominator = second.add(eps).sqrt_()
                parameter.addcdiv_(state["exp_avg"], denominator, value=-lr * beta1 / (1.0 - beta1))
                del denominator
            if leaves:
                del optimizer.state[parameter]


class SampledReference:
    """Mode "sampled" as a plain loop, without misa's memory and without a daemon: the same draws, the same bits.

    Use it as a context manager around an unchanged training loop.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        delta: float = 0.03,
        eta: float = 1.0,
        alpha: float = 0.1,
        inner_steps: int = 50,
        seed: int = 0,
        always: tuple[str, ...] = (),
        needs: tuple[tuple[str, str], ...] = (),
        apart: tuple[tuple[str, str], ...] = (),
        wait_for_stable_loss: bool = False,
        stable_window: int = 50,
        stable_tolerance: float = 0.05,
        stable_hold: int = 10,
        count_micro_batches: bool = False,
        tasks: Mapping[str, float] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._tasks = Tasks(tasks)
        named = list(model.named_parameters())
        sampled = Sampled(delta, eta, alpha, inner_steps, seed, always, needs, apart, wait_for_stable_loss, stable_window,
                          stable_tolerance, stable_hold, count_micro_batches)
        self._driver = SamplingDriver(named, [optimizer], sampled)
        self._handles: list[Any] = []
        self._statistics: dict[int, tuple[float, float, int]] = {}
        self._gradients: dict[int, int] = {}
        self._loss = StepLoss()

    def __enter__(self) -> SampledReference:
        # Taken when a gradient is complete, as a managed run does: before clipping and the like.
        for parameters in self._driver._parameters:
            for parameter in parameters:
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))
        self._driver.begin()
        self._handles.append(self._optimizer.register_step_post_hook(self._after_step))
        take_over(self._tasks)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        let_go(self._tasks)
        self._driver.end()

    @property
    def active_modules(self) -> list[int]:
        return self._driver.active_modules

    def step_loss(self, loss: torch.Tensor | float, rows: int = 0) -> None:
        """As `Run.step_loss`."""
        self._loss.add(loss, rows)

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, for a resume."""
        return self._driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on in the round, and at the step of it, where `state_dict` was taken."""
        self._driver.load_state_dict(state)
        self._tasks.load_state(self._driver.tasks())

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._statistics[id(parameter)] = _C.gradient_statistics(parameter.grad)
        self._gradients[id(parameter)] = self._gradients.get(id(parameter), 0) + 1

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        statistics: list[Statistics] = []
        for module, parameters in enumerate(self._driver._parameters):
            total, squares, count = 0.0, 0.0, 0
            for parameter in parameters:
                s, q, n = self._statistics.pop(id(parameter), (0.0, 0.0, 0))
                total, squares, count = total + s, squares + q, count + n
            if count:
                statistics.append((module, total, squares, count))
        micro_batches = max(self._gradients.values(), default=1)
        self._gradients.clear()
        loss, _ = self._loss.take()
        self._driver.end_step(statistics, lambda _, action: action(), loss, micro_batches, self._tasks.end_step())
