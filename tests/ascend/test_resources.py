"""Too few NPUs or CPUs are an error in seconds with the counts, where upstream would wait for ever."""

import pytest
import ray

from mindspeed_qerl.ascend.engine import check_resources
from mindspeed_qerl.ascend.settings import needed_cpus
from mindspeed_qerl.errors import EngineError
from mindspeed_qerl.recipe.compose import compose
from mindspeed_qerl.recipe.reader import read_recipe
from mindspeed_qerl.recipe.types import Recipe


@pytest.fixture
def cluster():
    def start(npus: int, cpus: int) -> None:
        ray.init(address="local", num_cpus=cpus, resources={"NPU": npus}, include_dashboard=False,
                 logging_level="ERROR")
    yield start
    ray.shutdown()


def asked(npus: int, cpus_per_npu: int) -> Recipe:
    return read_recipe(compose("grpo_qwen3_30b_a3b_gsm8k_16npu", [
        f"rl_config.actor_resource.num_npus={npus}", f"rl_config.num_cpus_for_placement_group={cpus_per_npu}"]))


def test_twelve_npus_where_sixteen_are_asked(cluster, monkeypatch):
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7,8,9,10,11")
    cluster(npus=12, cpus=200)
    with pytest.raises(EngineError, match=r"16 NPUs are asked for .* Ray sees 12\..*ASCEND_RT_VISIBLE_DEVICES names "
                                          r"fewer \(it is '0,1,2"):
        check_resources(asked(16, 8))


def test_too_few_cpus_for_the_placement(cluster):
    cluster(npus=16, cpus=128)  # 16 x 8: upstream's bundles take them all, and its transfer dock waits for 10 more
    assert needed_cpus(asked(16, 8)) == 128 + 2 + 10
    with pytest.raises(EngineError, match=r"need 140 CPUs; Ray has 128\. .*num_cpus_for_placement_group=7, or start "
                                          r"Ray with --num-cpus=140"):
        check_resources(asked(16, 8))
    check_resources(asked(16, 7))
