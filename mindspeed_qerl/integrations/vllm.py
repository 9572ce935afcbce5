"""AQN and the proof of arrival inside a vLLM worker, whoever trains.

Every trainer ends in the same few calls of a worker: `load_weights` of its model or `add_lora`
when it syncs, `sleep`, and `execute_model` when it samples. They are wrapped on the worker: before
a sync the noise is taken off, before the next sampled batch what arrived is compared and the noise
of the step is put on.

Three ways in: `worker_extension_cls="mindspeed_qerl.integrations.vllm.NoiseExtension"`; the plugin
`mindspeed_qerl`, which vLLM loads in every process and which acts where MINDSPEED_QERL_ROLLOUT is
set; or a `WorkerRollout` in code. Read with vLLM 0.11 (vllm-ascend 0.11) and 0.32.
"""

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from mindspeed_qerl.aqn.injector import NoiseInjector
from mindspeed_qerl.aqn.target import NoiseController
from mindspeed_qerl.aqn.targets import check_multipliers, multipliers_of, select_targets
from mindspeed_qerl.lora.arrival import Arrival, Factors
from mindspeed_qerl.lora.held import ELSEWHERE, Held, Named, held_parts, not_compared

from .cpu import refuse_packed_weights
from .draws import RequestDraws
from .lines import Lines
from .requests import BYPASSED, LoadedAdapters, Steps, Weights, bypasses
from .rounding import rounded_without_bias, too_little
from .settings import VARIABLE, Settings, settings_of_environment

logger = logging.getLogger(__name__)
# vLLM's own ways to bring weights, which put others in their place before they load them
RELOADS = ("start_weight_update", "reload_weights")
MARK = "mindspeed_qerl_rollout"  # attribute of workers
Method = Callable[..., Any]  # of a worker, a model or a trainer


def wrap(owner: Any, name: str, wrapper: Method) -> None:
    """Makes the method `name` of `owner` call `wrapper`, with itself before its arguments."""
    setattr(owner, name, partial(wrapper, getattr(owner, name)))


class WorkerRollout:
    """Noise and arrival in one worker.

    Args:
        worker: vLLM's, its model loaded.

    Attributes:
        step: training step, counted from 0, of the next noise; a trainer in this process may set
            another function. By itself a worker counts syncs: the first is the one before step 0.
        total_steps: of the run, if the trainer tells it.
        adapters: what the trainer has merged into the weights that it sends, if it tells it.
        is_told: whether somebody calls `measured`, without which no noise can follow a target.

    Raises:
        ValueError: no norm of the model is a target.
        RuntimeError: the worker has noise already, or weights that none can be synced into.
    """

    syncs = 0
    failed = 0  # proofs and batches
    sigma: float | None = None  # of the last noise
    has_reloaded = False  # in this sync, in one of vLLM's own ways
    injector: NoiseInjector | None = None  # while its noise is on
    controller: NoiseController | None = None  # from the first noise on
    draws: RequestDraws | None = None  # where not all requests have one
    noise_step = -1  # of the last noise
    measured_step = -1  # of what was told last
    is_told = False
    weights = Weights.WHOLE
    is_clean = False  # no noise is put on

    def __init__(self, worker: Any, settings: Settings):
        if hasattr(worker, MARK):
            raise RuntimeError(
                "this vLLM worker has AQN already: it was added twice (by the plugin "
                f"and in code). Unset {VARIABLE}, or leave out the other"
            )
        setattr(worker, MARK, self)
        self.worker = worker
        self.settings = settings
        self.lines = Lines(worker, settings)
        refuse_packed_weights(self.model)
        self.step: Callable[[], int] = lambda: settings.first_step + max(self.syncs - 1, 0)
        self.total_steps: Callable[[], int | None] = lambda: None
        self.adapters: Callable[[], dict[str, list[Factors]]] = dict
        self.arrival = Arrival(settings.elements)
        self.steps = Steps()
        self.loaded = LoadedAdapters(settings.elements)
        self.share: dict[str, Any] = {}
        self.told: set[str] = set()  # problems of batches
        self.unbiased: set[str] = set()  # matrices that are rounded without bias, by name
        if settings.rounding == "unbiased":
            for held in held_parts(self.model):
                if held.part.dtype == torch.bfloat16 and held.part.dim() == 2:
                    self.unbiased.add(held.name)
        if settings.noise is not None:
            norms = select_targets(self.model, settings.targets, settings.exclude)
            multipliers_of(norms, check_multipliers(settings.multipliers))
            if settings.draws != "step":
                self.draws = RequestDraws(worker, settings.draws)
        wrap(self.model, "load_weights", self._load_weights)
        wrap(worker, "add_lora", self._add_lora)
        wrap(worker, "sleep", self._sleep)
        wrap(worker, "execute_model", self._execute_model)
        for name in RELOADS:
            if hasattr(worker, name):
                wrap(worker, name, self._reload)
        if hasattr(worker, "finish_weight_update"):
            wrap(worker, "finish_weight_update", self._finish_reload)

    @property
    def model(self) -> torch.nn.Module:
        """The worker's, found anew: a reload may replace its parameters."""
        return self.worker.get_model()

    def figures(self) -> dict[str, float]:
        """Returns metrics for a trainer's own log: what is known of the last sync."""
        known = {
            "sync/count": self.syncs,
            "sync/failures": self.failed,
            "sync/arrived": self.share.get("arrived"),
            "aqn/sigma": self.sigma,
        }
        return {name: value for name, value in known.items() if value is not None}

    @contextlib.contextmanager
    def clean(self) -> Iterator[None]:
        """An evaluation, without noise; the caller resets vLLM's prefix cache before and after."""
        self.evaluate(True)
        try:
            yield
        finally:
            self.evaluate(False)

    def evaluate(self, is_on: bool) -> None:
        """An evaluation begins, which has no noise, or ends."""
        if not is_on:
            self._write("evaluation", noise=self.injector is not None)
        self._take_off()
        self.is_clean = is_on

    def _load_weights(self, original: Method, weights: Iterable[Named]) -> Any:
        return original(self._noted(weights))

    def _noted(self, weights: Iterable[Named]) -> Iterator[Named]:
        """Yields what is loaded of what a trainer sends, when it was noted for the proof. Tensors
        without values are of a set-up (FakeRDTTensor), no sync.
        """
        for name, tensor in weights:
            if type(tensor).__name__.startswith("Fake"):
                yield name, tensor
                continue
            self._start_sync()
            sent = rounded_without_bias(name, tensor, self.unbiased)
            if self._is_proved:
                self.arrival.expect(name, tensor, sent)
            yield name, sent

    def _reload(self, original: Method, *args, **kwargs) -> Any:
        self._start_sync()
        self.has_reloaded = True
        return original(*args, **kwargs)

    def _add_lora(self, original: Method, request: Any) -> Any:
        self._refuse_discarded()
        self._start_sync()
        self.loaded.load(request, self.syncs)
        if self.loaded.is_new(request) or getattr(request, "lora_tensors", None):
            self._note_adapter(request)
        return original(request)

    def _note_adapter(self, request: Any) -> None:
        reason = self.loaded.expect(request) if self._is_proved else None
        if reason:
            self._write_not_compared("adapters", reason)

    def _finish_reload(self, original: Method, *args, **kwargs) -> Any:
        result = original(*args, **kwargs)
        if self.loaded.required and not self.worker.list_loras():
            self.loaded.remove(self.syncs)
        return result

    def _sleep(self, original: Method, level: int = 1) -> Any:
        self._take_off()
        if level == 2:
            self.weights = Weights.DISCARDED
        return original(level)

    def _refuse_discarded(self) -> None:
        if self.weights is Weights.DISCARDED:
            raise RuntimeError(
                "vLLM slept at level 2, which discards the weights, and none were loaded since: "
                "load all of them after it wakes up (adapters alone are not enough)"
            )

    def _execute_model(self, original: Method, batch: Any = None, *args, **kwargs) -> Any:
        self._refuse_discarded()
        requests = getattr(batch, "scheduled_new_reqs", [])
        for request in requests:
            if request.lora_request and self.loaded.is_new(request.lora_request):
                self._start_sync()
                self.loaded.load(request.lora_request, self.syncs)
                self._note_adapter(request.lora_request)
        if self.weights is Weights.ARRIVING:
            self.weights = Weights.WHOLE
            self._compare_weights()
        if self.settings.arrival_every and not self.is_clean:
            self._check(requests)
        if self.settings.noise is not None and not (self.injector or self.is_clean):
            self._put_on()
        result = original(batch, *args, **kwargs)
        if self.loaded.waiting is not None:  # the first batch has brought it to its modules
            held = self.loaded.held(self.worker)
            self._prove("adapters", self.loaded.arrival, held, self.loaded.not_compared)
        return result

    def _compare_weights(self) -> None:
        if not self._is_proved:
            return
        if self.arrival.sent:
            bypassed = 0
            if self.has_reloaded and bypasses(self.worker):
                names = {held.name for held in held_parts(self.model)}
                bypassed = len(names - self.arrival.sent.keys())
            self._prove("weights", self.arrival, held_parts(self.model), {BYPASSED: bypassed})
        elif self.has_reloaded:
            self._write_not_compared("weights", BYPASSED)

    def _check(self, requests: Iterable[Any]) -> None:
        """Names what a training batch samples with that it should not, once."""
        for problem in (*self.loaded.problems(requests), self.steps.problem(self.step())):
            if problem and problem not in self.told:
                self.told.add(problem)
                self._write("problem", problem=problem)
                self._fail(problem)

    @property
    def _is_proved(self) -> bool:
        every = self.settings.arrival_every
        return bool(every) and (self.syncs - 1) % every == 0

    def _start_sync(self) -> None:
        if self.weights is Weights.ARRIVING:
            return
        self._take_off()
        self.syncs += 1
        self.has_reloaded = False
        self.steps.has_synced = True
        self.weights = Weights.ARRIVING
        self.arrival.begin(self.adapters())

    def _prove(
        self, what: str, arrival: Arrival, held: Iterable[Held], reasons: Mapping[str, int]
    ) -> None:
        """Compares what was sent with what is held; reasons: why how many more are not compared."""
        failures = arrival.failures(held, not_compared(self.model))
        counts = Counter(arrival.not_compared.values())
        del counts[ELSEWHERE]
        counts += Counter(reasons)  # those above 0
        share = arrival.share if what == "weights" and not failures else {}
        self.share = share or self.share
        problem = little = too_little(self.settings.min_arrived, **share)
        self._write(
            "arrival",
            **share,
            too_little=little,
            of=what,
            tensors=len(arrival.sent) - len(arrival.not_compared),
            largest=arrival.largest,
            elements=arrival.elements,
            not_compared=counts.total(),
            reasons=counts,
            unchanged=arrival.unchanged,
            failures=[failure._asdict() for failure in failures],
        )
        if failures:
            shown = "; ".join(f"{name}: {fault}" for name, fault in failures[:5])
            problem = (
                f"{len(failures)} of {len(arrival.sent)} tensors of the {what} did not arrive in "
                f"vLLM: {shown}"
            )
        if problem:
            self._fail(problem)

    def _write_not_compared(self, what: str, reason: str) -> None:
        nothing = {"tensors": 0, "unchanged": False, "failures": []}
        self._write("arrival", of=what, not_compared=1, reasons={reason: 1}, **nothing)

    def _fail(self, problem: str) -> None:
        self.failed += 1
        message = f"sync {self.syncs}: {problem}"
        if self.settings.stop:
            raise RuntimeError(f"{message}. (stop: false in {VARIABLE} reports it and goes on.)")
        logger.error(message)

    def _put_on(self) -> None:
        settings = self.settings
        step = self.step()
        schedule = settings.schedule(self.total_steps())
        if schedule.schedule == "target" and not self.is_told:
            raise RuntimeError(
                "noise.schedule = 'target' needs the trainer's log-probs, and nobody tells them to "
                "this vLLM worker: ms-swift does, TRL with vllm_importance_sampling_correction, its "
                "default, and both with vLLM in their own process (mode colocate)"
            )
        if self.controller is None:
            self.controller = NoiseController(schedule, self.lines.measured_before(step))
        injector = NoiseInjector(
            self.model,
            settings.targets,
            settings.exclude,
            check_multipliers(settings.multipliers),
            seed=settings.seed,
            draws=settings.draws,
            runner=getattr(self.worker, "model_runner", None),
        )
        if injector.rows and self.draws:
            self.draws.begin(injector.rows, step)
        report = injector.apply(self.controller.level(step))
        self.injector = injector
        self.noise_step = step
        self.sigma = report.sigma
        if step == schedule.total_steps:
            stays = f"sigma stays {report.sigma:.3g}"
            logger.warning(f"AQN's schedule has {step} steps, and the run goes on: {stays}")
        found = report.to_metrics() | {"names": injector.names}
        self._write("noise", step=step, total_steps=schedule.total_steps, **found)

    def measured(self, values: Mapping[str, float]) -> None:
        """Takes what the last noise did, `mismatch/*` over the answers of all ranks; of a step the
        first that is told counts.
        """
        if self.controller and self.measured_step != self.noise_step:
            step = self.measured_step = self.noise_step
            metrics = self.controller.update(self.controller.level(step), values)
            self._write("measured", step=step, **values, **metrics)
            if not values["mismatch/sensitivity"] > 0:
                logger.warning("AQN: no log-prob of this step is known, so that sigma stays")

    def _take_off(self) -> None:
        if self.injector:
            self.injector.remove()
            self.injector = None

    def _write(self, event: str, **values: Any) -> None:
        self.lines.write(event, self.syncs, **values)


def attach_when_loaded(worker: Any) -> None:
    """Makes a worker that has yet to load its model a WorkerRollout by MINDSPEED_QERL_ROLLOUT; does
    nothing without it, and once where the plugin and `worker_extension_cls` both ask.
    """
    settings = settings_of_environment()
    if settings is None:
        return

    def load_and_attach(original: Method, *args, **kwargs) -> Any:
        result = original(*args, **kwargs)
        if not hasattr(worker, MARK):
            WorkerRollout(worker, settings)
        return result

    wrap(worker, "load_model", load_and_attach)


class NoiseExtension:
    """For `worker_extension_cls`."""

    def __new__(cls, *args, **kwargs) -> Any:
        worker = super().__new__(cls)
        attach_when_loaded(worker)
        return worker


def register() -> None:
    """vLLM's general plugin: each worker of this process, when it has loaded its model."""
    if not os.environ.get(VARIABLE):
        return
    # of `v1.worker.worker_base` today, of `worker.worker_base` in 0.11
    from vllm.v1.executor.multiproc_executor import WorkerWrapperBase

    init_device = WorkerWrapperBase.init_device

    def attach_and_init(self, *args, **kwargs) -> Any:
        # before it, `init_worker` has loaded this plugin
        attach_when_loaded(self.worker)
        return init_device(self, *args, **kwargs)

    WorkerWrapperBase.init_device = attach_and_init
