"""Puts the noise on the rollout model's norms, says what it did, and takes it off again."""

import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rows import NoiseOfRows
from .schedule import NoiseLevel
from .targets import multipliers_of, select_targets

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoiseReport:
    """Describes what `NoiseInjector.apply` did.

    Attributes:
        sigma, stage: the nominal standard deviation, 0.0 in stage 0, and where the schedule stood.
        layers: number of the norms that get noise, in stage 0 too.
        expected_std: sigma, or with multipliers the root mean square of sigma times a weight's
            multiplier over all weights of these norms.
        measured_std: standard deviation in float64 of (noisy - clean) over all weights of these
            norms, as they lie in the model, i.e. after rounding to its dtype; of several draws,
            of draw 1. Far below expected_std when BF16 swallows the noise.
        changed_fraction: share of these weights, 0..1, that differ from the clean ones at all.
    """

    sigma: float
    stage: int
    layers: int
    expected_std: float
    measured_std: float
    changed_fraction: float

    def to_metrics(self) -> dict[str, float]:
        return {f"aqn/{name}": value for name, value in asdict(self).items()}


def standard_normal(seed: int, step: int, name: str, shape: Sequence[int]) -> Tensor:
    """N(0, 1) noise, float32 on the CPU, that depends on its arguments only.

    A private generator is keyed by SHA-256 of (seed, step, parameter name), so every rank that
    holds the parameter draws the same noise, whatever else it holds, and the global generator is
    not touched.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    # it keeps 32 bits of a seed
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


class NoiseInjector:
    """Gaussian noise on the norm weights of `model`, in place, on and off.

    While noise is on, the weights belong to the injector: call `remove()` before anything syncs,
    offloads, saves or compares them, and `apply(level)` after. If they were overwritten with the
    noise on, `remove()` raises instead of putting stale values back.

    Args:
        model: the rollout model; its norms' storage is kept, since vLLM's kernels hold it.
        targets, exclude: see `select_targets`; multipliers: see `multipliers_of`. Their ValueErrors
            are raised here; norms with factor 0 get no noise.
        draws: who has a draw of its own: "step"; or "group" or "answer", whose rows the model
            runner of vLLM v1, `runner`, knows. stays: see `NoiseOfRows`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        targets: str | Sequence[str] = "auto",
        exclude: str | Sequence[str] = (),
        multipliers: Iterable[tuple[str, float]] = (),
        *,
        seed: int,
        draws: str = "step",
        runner: Any = None,
        stays: bool = False,
    ):
        self.seed = seed
        self.draws = draws
        selected = select_targets(model, targets, exclude)
        # (path, norm, what sigma is multiplied with)
        self.targets: list[tuple[str, torch.nn.Module, float]] = []
        names = []
        for name, factor in multipliers_of(selected, multipliers).items():
            if factor:
                self.targets.append((name, selected[name], factor))
                names.append(name if factor == 1 else f"{name} (x {factor:g})")
        if not names:
            raise ValueError(
                f"AQN multipliers are 0 for all {len(selected)} norms; to run without noise, use "
                "aqn=off"
            )
        # (path, norm, its clean weight and what is on it, copies on the CPU)
        self._applied: list[tuple[str, torch.nn.Module, Tensor, Tensor]] = []
        self.rows: NoiseOfRows | None = None
        if draws != "step":
            self.rows = NoiseOfRows(runner, [norm for _, norm, _ in self.targets], stays)
        logger.info(f"AQN targets {len(names)} RMSNorm layers: {', '.join(names)}")

    @property
    def names(self) -> list[str]:
        """Module names of the norms that get noise."""
        return [name for name, _, _ in self.targets]

    @property
    def is_on(self) -> bool:
        """True if noise lies on the weights."""
        return bool(self._applied)

    @torch.no_grad()
    def apply(self, level: NoiseLevel) -> NoiseReport:
        """Adds the noise of a step to the clean weights (what was on before is removed first) and
        reports it.

        Per weight: float32 noise on the CPU, times sigma (and the norm's multiplier), added in
        float32, rounded once to the weight's dtype. With a draw for each group or answer 1 is on
        the weight meanwhile, and the noisy weights go to the rows.

        Raises:
            RuntimeError: see `remove`.
        """
        self.remove()
        differences = []  # of noisy and clean weights, float64
        of_rows = []
        weights = 0
        squares = 0.0
        for name, norm, factor in self.targets:
            weight = norm.weight
            weights += weight.numel()
            squares += weight.numel() * factor**2
            if not level.sigma:
                continue
            clean = weight.detach().to("cpu", copy=True)
            draw = partial(self._noisy, f"{name}.weight", clean, level.sigma * factor, level.step)
            noisy = draw(1 if self.rows else None)
            of_rows.append(draw)
            put_on = torch.ones_like(clean) if self.rows else noisy
            self._applied.append((name, norm, clean, put_on))
            weight.copy_(put_on)
            differences.append(noisy.double() - clean.double())
        if self.rows and of_rows:
            self.rows.begin(of_rows)
        difference = torch.cat(differences or [torch.zeros(1)])
        report = NoiseReport(
            sigma=level.sigma,
            stage=level.stage,
            layers=len(self.targets),
            expected_std=math.sqrt(squares / weights) * level.sigma,
            measured_std=difference.std(correction=0).item(),
            changed_fraction=difference.ne(0).double().mean().item(),
        )
        self._log(level.step, report)
        return report

    def _noisy(self, name: str, clean: Tensor, sigma: float, step: int, draw: int | None) -> Tensor:
        """Returns a weight with the noise of a draw, or of the step, on the CPU."""
        key = name if draw is None else f"{name}/{draw}"
        noise = standard_normal(self.seed, step, key, clean.shape)
        return (clean + sigma * noise).to(clean.dtype)  # the sum is float32

    def _log(self, step: int, report: NoiseReport) -> None:
        done = "noise off"
        if report.sigma:
            whose = "" if self.draws == "step" else f", a draw for each {self.draws}"
            done = (
                f"Applied noise to {report.layers} RMSNorm layers{whose}: sigma {report.sigma:.3g}, "
                f"measured std {report.measured_std:.3g}, expected {report.expected_std:.3g}, "
                f"{100 * report.changed_fraction:.4g}% changed"
            )
        is_lost = report.measured_std < report.expected_std / 2
        level = logging.WARNING if is_lost else logging.INFO
        logger.log(level, f"AQN step {step}, stage {report.stage}: {done}")

    @torch.no_grad()
    def remove(self) -> None:
        """Puts the clean weights back, bit for bit. Does nothing when no noise is on.

        Raises:
            RuntimeError: some weights are not what `apply` left. Nothing is put back then.
        """
        overwritten = []
        for name, norm, _, noisy in self._applied:
            if not _same_bits(norm.weight, noisy):
                overwritten.append(name)
        if overwritten:
            raise RuntimeError(
                f"AQN noise is on, and {len(overwritten)} of {len(self._applied)} noisy weights "
                f"were overwritten, first {overwritten[0]}.weight. Restoring would put stale "
                "values back. Call remove() before syncing weights into the model and apply() "
                "after; to continue now, sync all weights and build a new NoiseInjector."
            )
        for _, norm, clean, _ in self._applied:
            norm.weight.copy_(clean)
        self._applied = []
        if self.rows:
            self.rows.end()


def _same_bits(weight: Tensor, expected: Tensor) -> bool:
    """Bitwise, so that a NaN equals itself and -0.0 is not 0.0."""
    actual = weight.detach().cpu().contiguous()
    return actual.dtype == expected.dtype and torch.equal(
        actual.view(torch.uint8), expected.view(torch.uint8)
    )
