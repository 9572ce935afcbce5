"""Expert load balancing is not emulated."""

from mindspeed_qerl.emulation.extensions import not_emulated

ExpertLoadBalancer = not_emulated("ExpertLoadBalancer (expert_map_path)")
