"""Noise and arrival around a worker that has what vLLM's has, and no more."""

import asyncio
import importlib
import inspect
import json
import logging
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from mindspeed_qerl.integrations import report
from mindspeed_qerl.integrations.cpu import keep_weights
from mindspeed_qerl.integrations.draws import RequestDraws
from mindspeed_qerl.integrations.report import faults, read_lines
from mindspeed_qerl.integrations.rounding import rounded_without_bias
from mindspeed_qerl.integrations.settings import Settings, read_settings, settings_of_environment
from mindspeed_qerl.integrations.trainer import follow
from mindspeed_qerl.integrations.vllm import WorkerRollout
from mindspeed_qerl.lora.arrival import PREFIX
from mindspeed_qerl.lora.rounding import dither_of

NOISE = {"sigma_start": 0.05, "sigma_end": 0.01, "num_stages": 2, "total_steps": 4}


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(256))


class Model(torch.nn.Module):
    """A norm after the blocks, and a layer without noise."""

    def __init__(self, norm: type[torch.nn.Module] = RMSNorm):
        super().__init__()
        self.model = torch.nn.ModuleDict({"norm": norm()})
        self.head = torch.nn.Linear(4, 4, bias=False)

    def load_weights(self, weights):
        for name, weight in weights:
            parameter = self.get_parameter(name)
            parameter.data = weight.to(parameter.dtype, copy=True)  # another, as some reloads do


class Worker:
    """vLLM's, as far as a rollout needs one."""

    rank = 0
    vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def __init__(self, model):
        self.model, self.sampled = model, []

    def get_model(self):
        return self.model

    def add_lora(self, request):
        return True

    def sleep(self, level=1):
        if level == 2:
            for weight in self.model.parameters():
                weight.data.zero_()

    def execute_model(self, batch=None):
        self.sampled.append(self.model.model["norm"].weight.detach().clone())


def serve(folder, model=None, **settings):
    """A worker, and its rollout that reports to `folder`; by default with NOISE."""
    worker = Worker(model or Model())
    return worker, WorkerRollout(
        worker, Settings(report=str(folder), **{"noise": NOISE, **settings})
    )


@pytest.fixture
def served(tmp_path):
    """A worker, and its rollout with noise from the second of two stages on."""
    return serve(tmp_path)


def sync(worker, value: float) -> torch.Tensor:
    """Sends weights in two buckets; returns the norm's."""
    norm = torch.full((256,), value)
    worker.model.load_weights([("model.norm.weight", norm)])
    worker.model.load_weights([("head.weight", torch.full((4, 4), value))])
    return norm


def test_noise_is_of_the_step_and_never_of_two(served, tmp_path):
    worker, _ = served
    for step, sigma in enumerate((0, 0, 0.05, 0.05)):
        norm = sync(worker, step + 1.0)
        worker.execute_model()
        worker.execute_model()  # the same noise
        assert torch.equal(*worker.sampled[-2:])
        deviation = (worker.sampled[-1] - norm).square().mean().sqrt().item()
        assert deviation == pytest.approx(sigma, rel=0.2)
    rows = read_lines(tmp_path)
    assert [row["step"] for row in rows if row["event"] == "noise"] == [0, 1, 2, 3]
    assert faults(rows) == []


TARGET = {"schedule": "target", "sigma_start": 0.01, "num_stages": 5, "total_steps": 20}


def steps_that_are_told(folder, first, last):
    """The norms of a worker that samples steps first..last-1 and is told what their noise did."""
    worker, rollout = serve(folder, noise=TARGET, first_step=first)
    rollout.is_told = True
    for step in range(first, last):
        norm = sync(worker, 1.0)
        worker.execute_model()
        sigma = (worker.sampled[-1] - norm).square().mean().sqrt().item()
        told = {"mismatch/k3": 4 * sigma**2 + 1e-4, "mismatch/sensitivity": 0.1 + step / 1000}
        rollout.measured(told)
        rollout.measured({name: 9 * value for name, value in told.items()})  # a second is too late
    return worker.sampled


def test_a_target_is_followed_and_a_resumed_run_goes_on_with_the_same_bits(tmp_path):
    whole = steps_that_are_told(tmp_path / "whole", 0, 20)
    reached = [row.get("aqn/reached_k3") for row in read_lines(tmp_path / "whole")]
    reached = [each for each in reached if each is not None]
    assert len(reached) == 16 and reached[-1] == pytest.approx(0.001, rel=0.3)
    parts = steps_that_are_told(tmp_path / "parts", 0, 13)  # killed, its last checkpoint after 9
    parts[9:] = steps_that_are_told(tmp_path / "parts", 9, 15)
    parts[12:] = steps_that_are_told(tmp_path / "parts", 12, 20)
    assert all(map(torch.equal, whole, parts)) and len(parts) == 20
    [header, *_, last] = report.table(read_lines(tmp_path / "whole"))
    assert "reached" in header and f"{reached[-1]:.3g} of 0.001" in last
    [picture] = report.draw(read_lines(tmp_path / "whole"), tmp_path)
    assert picture.name == "noise.png"


def test_what_a_target_was_not_told_is_a_warning(tmp_path, caplog):
    worker, rollout = serve(tmp_path, noise=TARGET, first_step=4)
    rollout.is_told = True
    for told, words in ((0.2, "steps without noise had a signal"), (math.nan, "sigma stays")):
        sync(worker, 1.0)
        worker.execute_model()
        rollout.measured({"mismatch/k3": 0.01, "mismatch/sensitivity": told})
        assert words in caplog.text.splitlines()[-1]
    assert len(caplog.messages) == 2


def test_a_target_that_nobody_measures_is_refused(tmp_path):
    worker, _ = serve(tmp_path, noise=TARGET)
    sync(worker, 1.0)
    with pytest.raises(RuntimeError, match="needs the trainer's log-probs, and nobody tells them"):
        worker.execute_model()


def test_noise_is_off_in_evaluations_and_asleep_and_on_again(served):
    worker, rollout = served
    rollout.step = lambda: 3
    norm = sync(worker, 2.0)
    worker.execute_model()
    with rollout.clean():
        worker.execute_model()
    worker.execute_model()
    worker.sleep()
    assert torch.equal(worker.model.model["norm"].weight, norm)
    worker.execute_model()
    noisy, evaluated, again, awake = worker.sampled
    assert torch.equal(evaluated, norm) and not torch.equal(noisy, norm)
    assert torch.equal(again, noisy) and torch.equal(awake, noisy)


def test_a_sync_of_adapters_alone_does_not_add_noise_to_noise(served):
    worker, rollout = served
    norm = sync(worker, 1.0)
    rollout.step = lambda: 3
    for _ in range(4):
        worker.add_lora(SimpleNamespace(lora_int_id=1))
        worker.execute_model()
    for sampled in worker.sampled:
        assert torch.equal(sampled, worker.sampled[0])
    assert (worker.sampled[0] - norm).std().item() == pytest.approx(0.05, rel=0.2)


def test_weights_discarded_asleep_and_not_sent_again_are_an_error(served):
    worker, _ = served
    sync(worker, 1.0)
    worker.sleep(2)
    for use in (worker.execute_model, lambda: worker.add_lora(SimpleNamespace(lora_int_id=1))):
        with pytest.raises(RuntimeError, match="level 2, which discards the weights"):
            use()
    sync(worker, 1.0)
    worker.execute_model()


@pytest.mark.parametrize("stop", [True, False])
def test_weights_that_did_not_arrive_stop_the_run_or_are_reported(tmp_path, caplog, stop):
    model = Model()
    load_weights = model.load_weights
    # transposed, and nobody looks
    model.load_weights = lambda pairs: load_weights([(name, w.flip(0)) for name, w in pairs])
    worker, _ = serve(tmp_path, model, noise=None, stop=stop)
    model.load_weights([("model.norm.weight", torch.arange(256.0))])
    if stop:
        with pytest.raises(RuntimeError, match="1 of 1 tensors .* did not arrive.*model.norm"):
            worker.execute_model()
    else:
        worker.execute_model()
        assert "did not arrive in vLLM: model.norm.weight" in caplog.text
    [fault] = faults(read_lines(tmp_path))
    assert fault.startswith("sync 1, rank 0: model.norm.weight:")


def arrivals_of_lora(folder, dtype, updates=(0, 1, 2), is_told=True, **settings):
    """The lines of syncs of PEFT's merged weights into a worker in bfloat16, as TRL has them, after
    `updates` with lr 5e-6; is_told: of the trainer's adapters.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    held, twin = Model().bfloat16(), Model().to(dtype)
    for model, kind in ((held, torch.bfloat16), (twin, dtype)):
        model.head = torch.nn.Linear(256, 1024, bias=False, dtype=kind)
    twin.head.weight.data.normal_(std=0.02).copy_(twin.head.weight.bfloat16())
    config = LoraConfig(r=32, lora_alpha=64, target_modules=["head"])
    logged: list[dict] = []
    trainer = SimpleNamespace(
        model=get_peft_model(twin, config), state=SimpleNamespace(global_step=0), log=logged.append
    )
    direction = torch.randn(1024, 32).sign()
    worker, rollout = serve(folder, held, noise=None, elements=0, stop=False, **settings)
    if is_told:
        follow(rollout, trainer)
    for count in updates:
        twin.head.lora_B["default"].weight.data = 5e-6 * count * direction
        trainer.model.merge_adapter()
        sent = {PREFIX.sub("", name): w.data for name, w in trainer.model.named_parameters()}
        worker.model.load_weights([(n, w) for n, w in sent.items() if "lora_" not in n])
        trainer.model.unmerge_adapter()
        worker.execute_model()
    rows = read_lines(folder)
    if is_told:  # as TRL and ms-swift log
        trainer.log({"loss": 0.5})
        trainer.log({"eval_loss": 0.5})
        figures = {"sync/count": len(updates), "sync/failures": len(faults(rows))}
        if (arrived := rows[-1].get("arrived")) is not None:
            figures["sync/arrived"] = arrived
        assert logged == [{"loss": 0.5} | figures, {"eval_loss": 0.5}]
    return rows


WAY_OUT = 'Load the trainer in float32 and set rounding: "unbiased", or sync adapters alone'


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize(
    "dtype, rounding, shares",
    [
        (torch.float32, "unbiased", (1, 1)),
        (torch.float32, "nearest", (0.06, 0.12)),
        (torch.bfloat16, "nearest", (0.06, 0.12)),
        (torch.bfloat16, "unbiased", (0.06, 0.12)),  # it came rounded
    ],
)
def test_the_share_of_the_update_that_arrived(tmp_path, dtype, rounding, shares, is_told):
    first, *rows = arrivals_of_lora(tmp_path, dtype, is_told=is_told, rounding=rounding)
    shown = "\n".join(report.table(rows))
    if dtype == torch.bfloat16 and not is_told:
        assert {row["arrived"] for row in rows} == {None} and "of the update: not known" in shown
        return
    assert "arrived" not in first  # there was no update
    for row, share in zip(rows, shares, strict=True):
        assert row["arrived"] == pytest.approx(share, abs=3 * row["arrived_error"])
        assert row["arrived_error"] < 0.05 and f"± {100 * row['arrived_error']:.2g} %" in shown
    told = faults(rows)
    assert len(told) == (0 if share == 1 else 2)
    assert all("% of the update arrived in vLLM" in each and WAY_OUT in each for each in told)


def test_an_update_that_vanishes_stops_the_run_or_is_accepted(tmp_path, caplog):
    arrivals_of_lora(tmp_path / "logged", torch.float32)
    assert "sync 2: 0.0" not in caplog.text and WAY_OUT in caplog.text
    caplog.clear()
    rows = arrivals_of_lora(tmp_path / "accepted", torch.float32, min_arrived=0)
    assert faults(rows) == [] and not caplog.text


def test_what_is_rounded_without_bias(tmp_path):
    """Experts by their own names, those of other workers as vLLM does; and nothing else."""
    model = Model().bfloat16()
    model.router = torch.nn.Linear(4, 4, bias=False)
    matrices = serve(tmp_path, model, noise=None, rounding="unbiased")[1].unbiased
    assert matrices == {"head.weight"}
    up = [f"mlp.experts.{expert}.up_proj.weight" for expert in range(2)]
    matrices |= {up[0], up[0].replace("up_", "gate_")}
    stack, head = torch.randn(2, 64, 8), torch.randn(4, 4)
    name = "base_model.model.mlp.experts.gate_up_proj"
    rounded = rounded_without_bias(name, stack, matrices)
    assert torch.equal(rounded[0, 32:], dither_of(up[0], (32, 8)).rounded(stack[0, 32:]))
    assert torch.equal(rounded[1], stack[1].bfloat16()) and not torch.equal(
        rounded[0], stack[0].bfloat16()
    )
    grid = head.bfloat16()
    assert torch.equal(rounded_without_bias("head.weight", grid.float(), matrices), grid)
    for name, tensor in (
        ("model.norm.weight", torch.randn(256)),
        ("router.weight", head),
        ("head.weight", head.half()),
    ):
        assert rounded_without_bias(name, tensor, matrices) is tensor


def test_a_model_without_norms_is_refused_with_what_was_seen(tmp_path):
    model = Model(lambda: torch.nn.LayerNorm(256))
    with pytest.raises(ValueError, match=r"matches no norm .* LayerNorm \(e.g. model.norm\)"):
        serve(tmp_path, model)


def test_tensors_without_values_are_of_a_set_up_and_no_sync(served):
    """As vLLM's sharded_rdt records its loaders."""
    from vllm.distributed.weight_transfer.sharded_rdt_fake import FakeRDTTensor

    worker, rollout = served
    rollout.step = lambda: 3
    sync(worker, 1.0)
    worker.execute_model()
    seen = []
    fake = FakeRDTTensor("head.weight", (4, 4), torch.float32, torch.device("cpu"))
    rollout._load_weights(seen.extend, [("head.weight", fake)])
    assert seen[0][1] is fake
    assert rollout.syncs == 1 and rollout.injector and len(rollout.arrival.sent) == 2


def test_multipliers_are_those_of_the_configs(tmp_path):
    multipliers = {"final": 2.0, "model.norm": 0.5, "*": 3}
    worker, rollout = serve(tmp_path, multipliers=multipliers)
    rollout.step = lambda: 3
    norm = sync(worker, 1.0)
    worker.execute_model()
    assert (worker.sampled[0] - norm).std().item() == pytest.approx(0.15, rel=0.2)
    for wrong, words in (({"7-9": 2.0}, "selects none of the 1 norms"), ({"final": -1}, "not -1")):
        with pytest.raises(ValueError, match=words):
            serve(tmp_path, multipliers=wrong)


def test_verls_step_is_that_of_its_weights(tmp_path, monkeypatch):
    """Also after a resume, which counting syncs would begin anew; a validation has no noise."""

    class Adapter:  # verl's sender, as far as it is called
        async def update_weights(self, weights, global_steps=None, **kwargs):
            worker.model.load_weights(weights)

        async def _execute_method(self, method, args):
            getattr(worker, method)(*args)

    class Extension:
        get_model, execute_model = Worker.get_model, Worker.execute_model
        add_lora, sleep, rank = Worker.add_lora, Worker.sleep, 0
        vllm_config, load_model = Worker.vllm_config, lambda self: None

    package = SimpleNamespace(ServerAdapter=Adapter, vLLMColocateWorkerExtension=Extension)
    base = SimpleNamespace(_ROLLOUT_REGISTRY={})
    servers = SimpleNamespace(LLMServerManager=SimpleNamespace(create=None))
    folder = SimpleNamespace(__path__=[], base=base, llm_server=servers)
    for name in ("verl", "verl.workers", "verl.workers.rollout"):
        monkeypatch.setitem(sys.modules, name, folder)
    for name in ("vllm_rollout", "vllm_rollout.utils"):
        monkeypatch.setitem(sys.modules, f"verl.workers.rollout.{name}", package)
    verl = importlib.import_module("mindspeed_qerl.integrations.verl")
    importlib.import_module("mindspeed_qerl.integrations.verl_step")
    [name] = base._ROLLOUT_REGISTRY.values()
    adapter = getattr(verl, name.rpartition(".")[2])()
    settings = {"report": str(tmp_path), "noise": NOISE}
    monkeypatch.setenv("MINDSPEED_QERL_ROLLOUT", json.dumps(settings))
    for steps in ((0, 1), (1, 2, 2, 3)):
        worker = verl.VerlNoiseExtension()
        worker.model, worker.sampled = Model(), []
        worker.load_model()
        for step in steps:
            weights = [("model.norm.weight", torch.full((256,), 1.0 + step))]
            asyncio.run(adapter.update_weights(weights, global_steps=step, peft_config=None))
            worker.set_validation(True)
            worker.execute_model()
            assert worker.sampled[-1].eq(1 + step).all()
            worker.set_validation(False)
            worker.execute_model()
    rows = read_lines(tmp_path)
    assert sorted(row["step"] for row in rows if row["event"] == "noise") == [0, 1, 1, 2, 2, 3]
    told = [row for row in rows if row["event"] == "evaluation"]
    assert len(told) == 6 and faults(rows) == []
    told[0]["noise"] = True
    assert faults(told) == ["sync 1, rank 0: an evaluation sampled with noise"]


def test_a_second_one_in_a_worker_is_refused(served, tmp_path):
    worker, _ = served
    with pytest.raises(RuntimeError, match="has AQN already: it was added twice"):
        WorkerRollout(worker, Settings(report=str(tmp_path), noise=NOISE))


def test_weights_that_vllm_packs_on_cpus_are_refused_or_kept(tmp_path, monkeypatch):
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    for owner, name in (
        (utils, "check_cpu_sgl_kernel"),
        (utils, "dispatch_cpu_unquantized_gemm"),
        (CPUUnquantizedExperts, "process_weights_after_loading"),
        (CPUUnquantizedExperts, "apply"),
    ):
        # put back in the end; the local engine of an earlier test may have changed them
        monkeypatch.setattr(owner, name, inspect.unwrap(getattr(owner, name)))
    monkeypatch.setattr(_custom_ops, "_supports_onednn", _custom_ops._supports_onednn)
    packed, kept = Model(), Model()
    utils.dispatch_cpu_unquantized_gemm(packed.head, remove_weight=True)
    with pytest.raises(RuntimeError, match=r"head.weight is empty.*cpu.keep_weights\(\)"):
        serve(tmp_path, packed)
    keep_weights()
    utils.dispatch_cpu_unquantized_gemm(kept.head, remove_weight=True)
    kept.head.input_size, kept.head.params_dtype = 4, torch.float32
    worker, _ = serve(tmp_path, kept)
    sync(worker, 3.0)
    worker.execute_model()
    assert kept.head.weight.eq(3).all()


def test_a_report_that_cannot_be_written_is_told_once(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    worker, _ = serve(tmp_path / "file" / "noise")
    for _ in range(3):
        sync(worker, 1.0)
        worker.execute_model()
    assert caplog.text.count("report cannot be written, the run goes on") == 1


def test_a_schedule_that_is_not_the_runs(served, caplog, tmp_path):
    worker, rollout = served
    rollout.total_steps = lambda: 100
    sync(worker, 1.0)
    with pytest.raises(ValueError, match="total_steps is 4, and the run has 100"):
        worker.execute_model()
    rollout.total_steps = lambda: None
    for _ in range(2):
        sync(worker, 1.0)
        worker.execute_model()
    [fault] = faults(read_lines(tmp_path))
    assert "schedule has 4 steps, and the last that sampled was 2" in fault
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            sync(worker, 1.0)
            worker.execute_model()
    assert faults(read_lines(tmp_path)) == []
    assert "schedule has 4 steps, and the run goes on" in caplog.text


def test_ranks_that_have_no_noise_or_another_are_named(served, tmp_path):
    worker, _ = served
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=3))
    sync(worker, 1.0)
    worker.execute_model()
    rows = read_lines(tmp_path)
    other = {**rows[-1], "rank": 1, "aqn/sigma": 0.5}
    told = faults([*rows, other])
    assert any("step 0: ranks [2] have no noise" in fault for fault in told)
    assert any("step 0: the ranks have noise of different sigma" in fault for fault in told)


@pytest.mark.parametrize("noise", [NOISE | {"total_steps": 1}, None])
@pytest.mark.parametrize("told", [True, False])
def test_a_replica_that_is_silent_is_named(tmp_path, noise, told):
    """Of two engines that the settings or vLLM tell; a resumed run has more workers, not fewer."""
    settings = {"replicas": 2} if told else {}
    worker, _ = serve(tmp_path, noise=noise, **settings)
    if not told:
        parallel = SimpleNamespace(world_size=1, data_parallel_size=2)
        worker.vllm_config = SimpleNamespace(parallel_config=parallel)
    sync(worker, 1.0)
    worker.execute_model()
    when, what = ("step 0", "noise") if noise else ("sync 1", "proof")
    [fault] = faults(read_lines(tmp_path))
    assert fault.startswith(f"{when}: 1 of 2 replicas have no {what}: start vLLM with the plugin")
    [file] = tmp_path.iterdir()
    for other in ("second", "resumed"):
        (tmp_path / f"{other}.jsonl").write_text(file.read_text())
        assert faults(read_lines(tmp_path)) == []


def test_whose_draw_a_request_has(monkeypatch):
    """Its id says it; with an external launcher its place, answers of other engines having others.
    A prompt has its own in each. Engines that share prompts or compile, or have the other model
    runner, and norms by 1 + weight are refused.
    """
    from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def made(
        kind="answer",
        rank="0",
        backend="external_launcher",
        caching=False,
        eager=True,
        prepares="_prepare_inputs",
    ):
        monkeypatch.setenv("RANK", rank)
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                world_size=4, data_parallel_size=2, distributed_executor_backend=backend
            ),
            cache_config=SimpleNamespace(enable_prefix_caching=caching),
            model_config=SimpleNamespace(enforce_eager=eager),
        )
        runner = SimpleNamespace(**{prepares: None})
        return RequestDraws(SimpleNamespace(vllm_config=config, model_runner=runner), kind)

    def of(draws, ids="abca"):
        prompts = [[7] if i == "c" else [5, 6] for i in ids]
        asked = zip(ids, prompts)
        return [draws.of(SimpleNamespace(req_id=i, prompt_token_ids=ids)) for i, ids in asked]

    assert of(made()) == of(made(rank="1")) == [1, 2, 3, 1]
    assert not set(of(made())) & set(of(made(rank="2")))
    served = of(made(backend="mp"))
    assert served == of(made(rank="2", backend="mp")) and len(set(served)) == 3
    first, second, other, again = of(made("group"))
    assert first == second == again != other and of(made("group", rank="2"))[0] == first
    draws = made()
    for step, ids, wanted in ((0, "ab", [1, 2]), (0, "cd", [3, 4]), (1, "ef", [1, 2])):
        draws.begin(SimpleNamespace(norms=[LlamaRMSNorm(4)]), step)
        assert of(draws, ids) == wanted
    with pytest.raises(ValueError, match="multiply by their weight, and Gemma2RMSNorm does"):
        draws.begin(SimpleNamespace(norms=[Gemma2RMSNorm(4)]), 2)
    with pytest.raises(ValueError, match="with enable_prefix_caching=False and enforce_eager=True"):
        made(caching=True, eager=False)
    with pytest.raises(ValueError, match="runner V1: set VLLM_USE_V2_MODEL_RUNNER=0"):
        made(prepares="prepare_inputs")


def test_settings(tmp_path, monkeypatch):
    monkeypatch.delenv("MINDSPEED_QERL_ROLLOUT", raising=False)
    assert settings_of_environment() is None
    monkeypatch.setenv("MINDSPEED_QERL_ROLLOUT", json.dumps({"report": "a", "seed": 3}))
    assert settings_of_environment() == Settings(report="a", seed=3)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"report": "b"}))
    monkeypatch.setenv("MINDSPEED_QERL_ROLLOUT", str(file))
    assert settings_of_environment() == Settings(report="b")


@pytest.mark.parametrize(
    "setting, words",
    [
        ({"noize": 0.05}, "unknown key of .*ROLLOUT 'noize', did you mean 'noise'"),
        ({"rounding": "unbaised"}, "rounding 'unbaised'.* Known: nearest, unbiased"),
        ({"replicas": 0}, "replicas = 0 must be an integer of at least 1"),
        ({"draws": "answers"}, "value of draws 'answers', did you mean 'answer'"),
        ({"min_arrived": 90}, r"min_arrived = 90 must be in 0\.\.1"),
        ({"noise": TARGET | {"target_start": 0.0}}, "target_start = 0.0"),
        ({"noise": {"sigma": 0.1}}, "unknown key of noise 'sigma', did you mean 'sigma_min'"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(setting, words):
    with pytest.raises(ValueError, match=words):
        read_settings({"report": "a"} | setting)


NOISE_LINE = {"event": "noise", "sync": 1, "rank": 0}


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "there is no folder"),
        ([], "has no line of a rollout worker"),
        (["[1, 2]", ""], "1.jsonl:1: damaged line"),
        ([json.dumps(NOISE_LINE), ""], "has a line that no rollout worker wrote"),
        (['{"event": "arrived", "sync": 1, "rank": 0}', ""], "that no rollout worker wrote"),
    ],
)
def test_a_folder_that_is_no_report_is_said_in_words(tmp_path, content, words, monkeypatch, capsys):
    folder = tmp_path / "noise"
    if content is not None:
        folder.mkdir()
        (folder / "1.jsonl").write_text("\n".join(content))
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    with pytest.raises(SystemExit) as ended:
        report.main()
    assert ended.value.code == 2 and words in capsys.readouterr().err
