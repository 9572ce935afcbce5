"""Makes verl's trainers send their step with the weights, and tell when they validate:
VERL_USE_EXTERNAL_MODULES names this.
"""

import sys
from functools import wraps

import ray
from verl.workers.rollout import base, llm_server

from .vllm import wrap

# with `_validate`; they are loaded when they make their servers
TRAINERS = {"ray_trainer": "RayPPOTrainer", "v1.trainer_base": "PPOTrainer"}

base._ROLLOUT_REGISTRY["vllm", "async"] = "mindspeed_qerl.integrations.verl.SteppingAdapter"


def without_noise(validate):
    """`validate` of a trainer, whose rollout workers sample without noise meanwhile."""

    def tell(trainer, is_on):
        for replica in trainer.llm_server_manager.get_replicas():
            server = replica.server_handle
            ray.get(server.collective_rpc.remote("set_validation", args=(is_on,)))
            ray.get(server.clear_kv_cache.remote())  # which holds what the norms made of prompts

    @wraps(validate)
    def validate_without(trainer, *args, **kwargs):
        tell(trainer, True)
        try:
            return validate(trainer, *args, **kwargs)
        finally:
            tell(trainer, False)

    return validate_without


def create(original, *args, **kwargs):
    for module, name in TRAINERS.items():
        trainer = getattr(sys.modules.get(f"verl.trainer.ppo.{module}"), name, None)
        if trainer and not hasattr(trainer._validate, "__wrapped__"):
            trainer._validate = without_noise(trainer._validate)
    return original(*args, **kwargs)


wrap(llm_server.LLMServerManager, "create", create)
