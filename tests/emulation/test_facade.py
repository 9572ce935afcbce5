"""torch as the stand-ins make it, each test in a process of its own: what was patched cannot be
unpatched.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mindspeed_qerl.emulation import (
    CANN_VARIABLE,
    NUM_NPUS_VARIABLE,
    SOC_VARIABLE,
    STAND_INS,
    environment,
)
from tests.emulation.forked import forking

PRELUDE = "import torch, torch_npu, pytest\n"


def start(code: str, num_npus: int = 4, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PRELUDE + textwrap.dedent(code)]
    env = {**os.environ, **environment(num_npus), **variables}
    return subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def check(*processes: subprocess.Popen) -> list[str]:
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
    return outputs


@pytest.fixture(scope="module")
def forked():
    """A function that runs code in a process of its own, with 4 NPUs."""
    with forking(PRELUDE, {**os.environ, **environment(4)}) as run:
        yield run


def test_every_way_to_name_a_device_means_the_cpu(forked):
    forked(
        """
            import io
            cpu = torch.device("cpu")
            for name in ("npu", "npu:1", "cuda:0", 0, torch.device("cuda", 1), "cpu", None):
                made = [torch.zeros(2, device=name), torch.tensor([1.0], device=name)]
                made.append(torch.ones(1).new_zeros(2, device=name))
                made += [torch.empty_like(made[0], device=name), torch.arange(3, device=name)]
                made.append(torch.randn(2, device=name))
                if name is not None:
                    made += [torch.ones(2).to(name), torch.ones(2).to(device=name, dtype=torch.bfloat16)]
                    made += torch.nn.Linear(2, 2).to(name).parameters()
                    made += torch.nn.Linear(2, 2, device=name).parameters()
                assert all(tensor.device == cpu for tensor in made), name
            x = torch.ones(2, requires_grad=True)
            assert x.npu() is x and x.cuda(1) is x and x.pin_memory() is x and x.is_npu and x.is_cuda
            model = torch.nn.Linear(2, 2)
            assert model.npu() is model and model.cuda() is model
            assert torch.ones(2).to(torch.bfloat16).dtype == torch.bfloat16  # .to of a dtype is still that
            assert torch.zeros(2, pin_memory=True, device="npu").device == cpu

            file = io.BytesIO()
            torch.save({"weight": torch.ones(2)}, file)
            for location in ("npu:0", "cuda", torch.device("cuda:1"), "cpu", None):
                file.seek(0)
                assert torch.load(file, location)["weight"].device == cpu

            assert x.type() == "torch.npu.FloatTensor" and x.bfloat16().type() == "torch.npu.BFloat16Tensor"
            assert x.type("torch.npu.HalfTensor").dtype == torch.float16
            assert x.type(torch.float64).dtype == torch.float64
            assert torch.cuda.LongTensor([1]).dtype == torch.int64
        """
    )


def test_devices_streams_and_memory(forked):
    forked(
        """
            npu = torch.npu
            assert npu is torch_npu.npu and npu.is_available() and npu.device_count() == torch.cuda.device_count() == 4
            assert npu.current_device() == 0
            for device, index in ((3, 3), ("npu:2", 2), ("npu", 0), ("cuda:1", 1)):
                npu.set_device(device)
                assert npu.current_device() == index
            side = npu.Stream()
            with npu.stream(side), npu.device(1):
                side.wait_stream(npu.current_stream())
            event = npu.Event(enable_timing=True)
            event.record()
            assert event.query() and event.elapsed_time(npu.Event()) == 0 and side == npu.current_stream()
            npu.synchronize(), npu.empty_cache(), npu.mstx.range_end(npu.mstx.range_start("x"))
            assert torch.device("npu:1") == torch.device("cuda", 1) == torch.device(0) == torch.device("cpu")
            assert isinstance(torch.device("npu"), torch.device) and torch.device("meta").type == "meta"
            (free, total), (less, _) = npu.mem_get_info(), npu.mem_get_info()
            assert npu.memory_allocated() == 0 and less < free < total == 2 << 30
            assert npu.get_device_properties(0).total_memory == 2 << 30
            from torch_npu.contrib import transfer_to_npu
            from torch_npu.utils.collect_env import get_cann_version
        """
    )


def test_random_numbers_come_from_one_generator(forked):
    forked(
        """
            numbers = lambda **where: torch.rand(3, **where)
            torch.manual_seed(3); expected = numbers()
            for seed in (torch.npu.manual_seed, torch.npu.manual_seed_all, torch.cuda.manual_seed):
                seed(3)
                assert torch.equal(numbers(device="npu"), expected)

            # What Megatron's rng tracker does: a second stream of numbers beside the first, which goes on undisturbed.
            torch.manual_seed(1); outer = numbers(), numbers()
            torch.manual_seed(1); first = numbers()
            before = torch.cuda.get_rng_state()
            torch.cuda.manual_seed(2); inner = numbers()
            torch.cuda.default_generators[0].set_state(before)
            assert torch.equal(first, outer[0]) and torch.equal(numbers(), outer[1])
            assert not torch.equal(inner, outer[1])

            generator = torch.Generator(device="npu").manual_seed(5)
            assert isinstance(generator, torch.Generator) and isinstance(torch.default_generator, torch.Generator)
            assert not isinstance(1, torch.Generator)
            drawn = torch.rand(3, generator=generator, device="npu")
            assert torch.equal(drawn, torch.rand(3, generator=torch.Generator().manual_seed(5)))
        """
    )


def test_patching_twice_changes_nothing(forked):
    forked(
        """
            from mindspeed_qerl.emulation import facade
            names = torch.Tensor.to, torch.zeros, torch.distributed.new_group, torch.load
            facade.install()
            assert names == (torch.Tensor.to, torch.zeros, torch.distributed.new_group, torch.load)
        """
    )


def test_an_operator_that_is_not_emulated_raises_when_it_is_called(forked):
    forked(
        """
            operator = torch_npu.npu_incre_flash_attention
            assert hasattr(torch_npu, "npu_swiglu")
            with pytest.raises(NotImplementedError, match="torch_npu.npu_incre_flash_attention"):
                operator(torch.ones(2))
            with pytest.raises(AttributeError, match="empty_with_swapped_memory"):
                torch_npu.empty_with_swapped_memory
            from torch.utils.cpp_extension import load
            with pytest.raises(NotImplementedError, match="'ffn'"):
                load(name="ffn", sources=["ffn.cpp"])
            assert load(name="grouped_matmul", sources=[]).npu_gmm
        """
    )


def test_kernels_of_mindspeed_for_npu_tensors_get_cpu_tensors(forked):
    forked(
        """
            from torch.library import Library, impl
            library = Library("mindspeed", "DEF")
            library.define("twice(Tensor x) -> Tensor")

            @impl(library, "twice", "PrivateUse1")
            def twice(x):
                return 2 * x

            assert torch.ops.mindspeed.twice(torch.ones(1)).item() == 2
            other = Library("another", "DEF")
            other.define("thrice(Tensor x) -> Tensor")
            impl(other, "thrice", "PrivateUse1")(lambda x: 3 * x)
            with pytest.raises(NotImplementedError):
                torch.ops.another.thrice(torch.ones(1))
        """
    )


def test_functions_that_use_the_stand_ins_can_be_sent_to_another_process(forked):
    forked(
        """
            import pickle, types
            cloudpickle = pytest.importorskip("cloudpickle")
            for module in (torch_npu, torch_npu.npu, torch_npu._C, torch_npu.profiler, torch_npu.utils, torch.npu):
                assert type(module) is types.ModuleType
            import torchair, acl
            torch_npu_npu, torch_npu_profiler = torch_npu.npu, torch_npu.profiler

            def work():
                return torch_npu_npu.current_device(), torch.npu.is_available(), torch_npu_profiler, torchair, acl

            assert pickle.loads(cloudpickle.dumps(work))()[:2] == (0, True)
        """
    )


RANK = """
import os
import torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("cpu:gloo,npu:hccl", init_method="file://" + os.environ["STORE"], rank=rank, world_size=2)
options = torch_npu._C._distributed_c10d.ProcessGroupHCCL.Options()
options.hccl_config = {"hccl_buffer_size": 200}
groups = [dist.new_group(backend="hccl", pg_options=options), dist.new_group([0, 1], None, "nccl"), dist.new_group()]
for group in groups:
    assert dist.get_backend(group) == "gloo"
    x = torch.tensor([rank + 1.0], device="npu")
    dist.all_reduce(x, group=group)
    assert x.item() == 3

# To oneself and to the other at once, as the resharding of weights does.
sent = [torch.full((2,), 10.0 * rank + to) for to in range(2)]
received = [torch.zeros(2) for _ in range(2)]
operations = [dist.P2POp(dist.isend, sent[to], to) for to in range(2)]
operations += [dist.P2POp(dist.irecv, received[source], source) for source in range(2)]
for work in dist.batch_isend_irecv(operations):
    work.wait()
assert [x[0].item() for x in received] == [rank, 10.0 + rank]
assert dist.batch_isend_irecv([dist.P2POp(dist.isend, sent[0], rank), dist.P2POp(dist.irecv, received[0], rank)]) == []
assert torch.equal(received[0], sent[0])
dist.destroy_process_group()
"""


def test_hccl_and_nccl_are_gloo_and_a_rank_can_send_to_itself(tmp_path):
    check(*(start(RANK, RANK=str(rank), STORE=str(tmp_path / "store")) for rank in range(2)))


def test_the_device_count_is_known_without_torch():
    code = "import sys, acl; print(acl.rt.get_device_count(), 'torch' in sys.modules)"
    for env, expected in ((environment(12), 12), ({**environment(1), NUM_NPUS_VARIABLE: "16"}, 16)):
        run = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.split() == [f"({expected},", "0)", "False"]


def test_the_stand_ins_come_first_and_what_was_there_is_kept(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/upstream/a", "/upstream/b"]))
    variables = environment(2)
    path = variables["PYTHONPATH"].split(os.pathsep)
    assert path[:3] == [str(STAND_INS), "/upstream/a", "/upstream/b"]
    assert Path(path[3], "mindspeed_qerl", "emulation") == STAND_INS.parent
    monkeypatch.setenv("PYTHONPATH", variables["PYTHONPATH"])
    assert environment(2)["PYTHONPATH"] == variables["PYTHONPATH"]
    assert Path(variables["ASCEND_HOME_PATH"]).is_dir()
    with pytest.raises(ValueError, match="num_npus is 0"):
        environment(0)


def test_what_vllm_ascend_asks_beyond_torch():
    check(
        start(
            """
        import pickle, acl
        assert torch.version.cann == "8.3.RC1" and torch.npu.get_soc_version() == 220
        assert acl.get_soc_name() == "Ascend910B1"
        assert pickle.loads(pickle.dumps(torch.device("npu"))) == torch.device("cpu")
        assert torch.histc(torch.tensor([0, 1, 1, 3]), 4, 0, 4).tolist() == [1, 2, 0, 1]
        assert torch.histc(torch.tensor([0.5]), 2, 0, 1).dtype == torch.float32
        from torch_npu.utils.collect_env import get_cann_version
        assert get_cann_version() == "8.3.RC1"
        x = torch.arange(60.0).view(20, 3)
        blocks = torch_npu.npu_format_cast(x, 29)
        assert torch.equal(torch.tensor(blocks.cpu().numpy()), x)
        assert torch.equal(torch.tensor(blocks.to("cpu").numpy()), x)
        assert torch_npu.get_npu_format(blocks.to("npu")) == 29 and x.cpu() is x
        """,
            **{SOC_VARIABLE: "910B", CANN_VARIABLE: "8.3.RC1"},
        )
    )


def test_ranks_gather_parts_of_different_lengths(tmp_path):
    code = """
        import os, torch.distributed as dist
        rank = int(os.environ["RANK"])
        dist.init_process_group("hccl", init_method="file://" + os.environ["STORE"], rank=rank, world_size=3)
        parts = [torch.empty(n, 2) for n in (3, 0, 1)]
        dist.all_gather(parts, torch.full((len(parts[rank]), 2), rank))
        assert [part.tolist() for part in parts] == [[[0, 0]] * 3, [], [[2, 2]]]
        dist.destroy_process_group()  # without it gloo's threads may outlive the interpreter, which then aborts
        """
    check(*(start(code, RANK=str(rank), STORE=str(tmp_path / "store")) for rank in range(3)))


@pytest.mark.parametrize("wrong", [{"soc": "910A"}, {"cann": "8.2.RC1"}])
def test_another_die_or_cann_is_refused(wrong):
    with pytest.raises(ValueError, match="emulated are 910B, 910C with CANN 8.5.0 or 8.3.RC1"):
        environment(2, **wrong)
