"""Makes verl's trainers send their step with the weights: VERL_USE_EXTERNAL_MODULES names this."""

from verl.workers.rollout import base

base._ROLLOUT_REGISTRY["vllm", "async"] = "mindspeed_qerl.integrations.verl.SteppingAdapter"
