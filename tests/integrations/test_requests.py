"""Syncs that did not come, and requests that do not use what came, around a worker that has what
vLLM's has, and no more.
"""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from mindspeed_qerl.integrations import report
from mindspeed_qerl.integrations.report import faults, read_lines
from mindspeed_qerl.integrations.requests import OWN_FORM, file_of
from tests.integrations.test_worker import serve, sync


def batch(*adapters):
    """vLLM's scheduler output; adapters: of a request each, None or a LoRARequest."""
    requests = [SimpleNamespace(lora_request=adapter) for adapter in adapters]
    return SimpleNamespace(scheduled_new_reqs=requests)


def by_path(folder, adapter=1, **tensors):
    """A LoRARequest of an adapter's folder, written anew if there are `tensors`."""
    if tensors:
        folder.mkdir(exist_ok=True)
        named = {f"head.lora_{name}": tensor for name, tensor in tensors.items()}
        named["mlp.experts.0.up_proj.lora_A"] = torch.ones(2, 4)
        save_file(
            {f"base_model.model.model.{name}.weight": named[name] for name in named},
            folder / "adapter_model.safetensors",
        )
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4}))
    return SimpleNamespace(lora_int_id=adapter, lora_path=str(folder))


class Head(torch.nn.Module):
    """vLLM's linear layer with one slot of adapters."""

    def __init__(self):
        super().__init__()
        self.base_layer = torch.nn.Linear(4, 4, bias=False)
        self.lora_a_stacked = (torch.zeros(1, 1, 2, 4),)
        self.lora_b_stacked = (torch.zeros(1, 1, 4, 2),)

    def load(self, a, b):
        self.lora_a_stacked[0][0, 0], self.lora_b_stacked[0][0, 0] = a, b


@pytest.fixture
def with_adapters(tmp_path):
    worker, rollout = serve(tmp_path / "report", noise=None, stop=False)
    worker.model.model["head"] = Head()
    manager = SimpleNamespace(lora_index_to_id=[1])
    lora = SimpleNamespace(_adapter_manager=manager)
    worker.model_runner = SimpleNamespace(lora_manager=lora)
    return worker, rollout, lambda: faults(read_lines(tmp_path / "report"))


def test_a_sync_that_never_came_is_named(tmp_path):
    worker, rollout = serve(tmp_path, noise=None)
    step = 5
    rollout.step = lambda: step
    sync(worker, 1.0)
    worker.execute_model()
    worker.execute_model()  # the step did not move
    step = 7
    with rollout.clean():
        worker.execute_model()  # an evaluation
    assert faults(read_lines(tmp_path)) == []
    problem = "step 7 sampled with the weights of step 5: no sync came"
    with pytest.raises(RuntimeError, match=problem):
        worker.execute_model()
    worker.execute_model()
    assert faults(read_lines(tmp_path)) == [f"sync 1, rank 0: {problem}"]
    step = 8
    sync(worker, 2.0)
    with rollout.clean():
        worker.execute_model()
    worker.execute_model()  # which has the evaluation's sync
    assert len(faults(read_lines(tmp_path))) == 1


def test_who_counts_syncs_or_syncs_before_its_step_moves_is_never_late(tmp_path):
    worker, rollout = serve(tmp_path, noise=None)
    for _ in range(3):
        sync(worker, 1.0)
        worker.execute_model()
        worker.execute_model()
    step = 2
    rollout.step = lambda: step
    sync(worker, 1.0)
    for step in range(3, 6):
        worker.execute_model()
        sync(worker, 1.0)
    assert faults(read_lines(tmp_path)) == []


@pytest.mark.parametrize("sent", [False, True])  # m2n loads some of them
def test_weights_that_bypass_load_weights_are_not_compared(tmp_path, monkeypatch, capsys, sent):
    from tests.integrations.test_worker import Worker

    monkeypatch.setattr(Worker, "start_weight_update", lambda self: None, raising=False)
    worker, _ = serve(tmp_path, noise=None)
    sync(worker, 1.0)
    worker.execute_model()
    worker.weight_transfer_engine = type("M2NWeightTransferEngine", (), {})()
    worker.start_weight_update()
    if sent:
        worker.model.load_weights([("head.weight", torch.zeros(4, 4))])
    worker.execute_model()
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        report.main()
    told = capsys.readouterr().out
    words = "1 of 1 weights, 1 not compared" if sent else "0 of 0 weights, 1 not compared"
    assert ended.value.code == 0 and words in told
    assert "not compared, 1 times: vLLM put them in place without" in told
    assert "is seen with 99 % (elements of it, of 256): 19 (1), 1 (100)" in told
    assert "nothing is wrong" not in told
    assert told.endswith("nothing that was compared is wrong; not compared: 1\n")


def test_a_request_without_the_adapter_of_its_sync_is_named(with_adapters):
    worker, rollout, told = with_adapters
    a, b = torch.randn(2, 4), torch.randn(4, 2)
    one = SimpleNamespace(lora_int_id=1)
    tensors = {"model.head.lora_A.weight": a, "model.head.lora_B.weight": b}
    peft_config = {"r": 2, "lora_alpha": 4}
    worker.execute_model(batch(None))  # nothing was synced
    worker.add_lora(SimpleNamespace(lora_int_id=1, lora_tensors=tensors, peft_config=peft_config))
    worker.model.model["head"].load(a, 2 * b)
    worker.execute_model(batch(one, one))
    with rollout.clean():
        worker.execute_model(batch(None))  # the base model's evaluation
    assert told() == []
    worker.execute_model(batch(one, None, None))  # told once
    words = "requests sample with no adapter instead of [1], loaded in sync 1"
    assert told() == [f"sync 1, rank 0: {words}"]


def test_a_sync_of_weights_that_removes_adapters_is_named(with_adapters):
    worker, rollout, told = with_adapters
    loaded = {1}
    worker.list_loras = lambda: loaded
    worker.add_lora(SimpleNamespace(lora_int_id=1))
    rollout._finish_reload(lambda: None)
    assert not rollout.loaded.removed_by
    rollout._finish_reload(loaded.clear)
    worker.execute_model(batch(None))
    [problem] = told()
    assert problem.endswith("loaded in sync 1; sync 1, of weights, has removed it from vLLM")
    worker.add_lora(SimpleNamespace(lora_int_id=2))
    worker.execute_model(batch(SimpleNamespace(lora_int_id=2)))
    assert len(told()) == 1


@pytest.mark.parametrize("is_loaded", [True, False])  # by the server's request, or `generate`
def test_adapters_by_path_are_read_and_compared(with_adapters, tmp_path, is_loaded):
    worker, _, told = with_adapters
    for seed in range(3):
        torch.manual_seed(seed)
        a, b = torch.randn(2, 4), torch.randn(4, 2)
        request = by_path(tmp_path / f"adapter{seed}", A=a, B=b)
        if is_loaded:
            worker.add_lora(request)
        if seed < 2:
            worker.model.model["head"].load(a, 2 * b)
        worker.execute_model(batch(request))
        worker.execute_model(batch(request))
        assert len(told()) == (2 if seed == 2 else 0)
    assert all("it is still what the sync before had sent" in each for each in told())
    rows = read_lines(tmp_path / "report")
    rows = [(row["tensors"], row["reasons"]) for row in rows if row["event"] == "arrival"]
    assert rows == 3 * [(2, {OWN_FORM: 1})]
    nowhere = SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path / "nowhere"))
    assert file_of(nowhere) is None
    worker.add_lora(nowhere)  # has been seen: nothing says that it is another one
    nowhere.lora_int_id = 4
    worker.add_lora(nowhere)
    worker.execute_model(batch(nowhere))
    [reason] = read_lines(tmp_path / "report")[-1]["reasons"]
    assert reason == "the adapter has no tensors, and its path no adapter_model.safetensors"


def asks(worker, *adapters):
    worker.execute_model(
        batch(*(adapter and SimpleNamespace(lora_int_id=adapter) for adapter in adapters))
    )


@pytest.mark.parametrize(
    "asked, problems",
    [
        # requests between syncs of adapters 1, 2 and 3
        ([(1,), (1, 2, 1), (2, 3)], []),  # some had waited in the queue
        ([(1,), (1, 1), (3,)], ["no request used [2], loaded in sync 2; .* until sync 3: 1"]),
        ([(1,), (2,), (3, 1)], ["requests sample with adapter 1 instead of [3]"]),
    ],
)
def test_requests_that_waited_are_no_faults(with_adapters, asked, problems):
    worker, _, told = with_adapters
    for number, adapters in enumerate(asked, start=1):
        worker.add_lora(SimpleNamespace(lora_int_id=number))
        asks(worker, *adapters)
    found = told()
    assert len(found) == len(problems)
    for each, words in zip(found, problems, strict=True):
        assert all(part in each for part in words.split(" .* "))


def test_an_adapter_that_generate_brings_is_required_of_the_next_requests(with_adapters):
    worker, _, told = with_adapters
    asks(worker, 1)
    asks(worker, 2)  # another sync
    assert told() == []
    asks(worker, None)
    assert "requests sample with no adapter instead of [2], loaded in sync 2" in told()[0]
