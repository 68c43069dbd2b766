"""Module-wise importance sampling, for managed runs and for the plain loop they are compared with."""

from __future__ import annotations

import dataclasses
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
        always: kinds of modules that are trained in every round besides ("embedding", "head", "norm", "small", …). They do
            not count in delta.
    """

    delta: float = 0.03
    eta: float = 1.0
    alpha: float = 0.1
    inner_steps: int = 50
    seed: int = 0
    always: tuple[str, ...] = ()

    def options(self) -> _C.SamplerOptions:
        return _C.SamplerOptions(self.delta, self.eta, self.alpha, self.inner_steps, self.seed)


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
        self._always = [i for i, (_, kind, _, _) in enumerate(self._groups) if kind in options.always]
        self._before = [(p, p.requires_grad) for parameters in self._parameters for p in parameters]
        self._trainable = {id(p) for p, required in self._before if required}

    def _make_sampler(self) -> _C.ModuleSampler:
        return _C.ModuleSampler(
            self._options.options(),
            [(self._groups[i][0], sum(p.numel() for p in self._parameters[i])) for i in self._samplable],
        )

    @property
    def round(self) -> int:
        return self._sampler.round()

    @property
    def digest(self) -> int:
        return self._sampler.digest()

    @property
    def active_modules(self) -> list[int]:
        """Indices of the modules this round trains, in registration order."""
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
        return {
            "options": dataclasses.asdict(self._options),
            "sampler": torch.frombuffer(bytearray(self._sampler.serialize()), dtype=torch.uint8),
        }

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
        return sampler

    def load_state_dict(self, state: Any) -> None:
        """Raises as `check_state_dict`, with nothing changed."""
        self._sampler.restore(self.check_state_dict(state))
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
                 task: tuple[str, float] = ("", 1.0)) -> None:
        """Folds the statistics of one step in, which is this task's; at the end of a round hands what has to happen to each
        module to `defer`."""
        # Modules that came later have no part in the draws.
        statistics = self._of_all_ranks([s for s in statistics if s[0] < len(self._groups)])
        place = {module: i for i, module in enumerate(self._samplable)}
        before = [self._samplable[i] for i in self._sampler.active()]
        for module, total, squares, count in statistics:
            if module in place and module in before:
                self._sampler.observe(place[module], total, squares, count)
        if not self._sampler.end_step(*task):
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

    def _of_all_ranks(self, statistics: Sequence[Statistics]) -> Sequence[Statistics]:
        """In a distributed job the sums over all processes, so that every one draws the same sets; a digest of what has been
        drawn so far is compared on the way."""
        ranks = world_size()
        if ranks == 1:
            return statistics
        mine = torch.zeros(len(self._groups) + 1, 3, dtype=torch.float64)
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
        return [(module, float(s), float(q), int(n)) for module, (s, q, n) in enumerate(total.tolist()) if n]

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
        tasks: Mapping[str, float] | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._tasks = Tasks(tasks)
        named = list(model.named_parameters())
        self._driver = SamplingDriver(named, [optimizer], Sampled(delta, eta, alpha, inner_steps, seed, always))
        self._handles: list[Any] = []
        self._statistics: dict[int, tuple[float, float, int]] = {}

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

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state, for a resume."""
        return self._driver.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on in the round, and at the step of it, where `state_dict` was taken."""
        self._driver.load_state_dict(state)
        self._tasks.load_state(self._driver.tasks())

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self._statistics[id(parameter)] = _C.gradient_statistics(parameter.grad)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        statistics: list[Statistics] = []
        for module, parameters in enumerate(self._driver._parameters):
            total, squares, count = 0.0, 0.0, 0
            for parameter in parameters:
                s, q, n = self._statistics.pop(id(parameter), (0.0, 0.0, 0))
                total, squares, count = total + s, squares + q, count + n
            if count:
                statistics.append((module, total, squares, count))
        self._driver.end_step(statistics, defer=lambda _, action: action(), task=self._tasks.end_step())
