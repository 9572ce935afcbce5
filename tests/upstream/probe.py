"""One iteration of the real engine on given weights, with everything of interest written to a
folder.

FOLDER/full.pt holds {"full", "adapters"} (reference.py). Written: rank{r}.pt with the rank's place,
its training weights, vLLM's weights after a sync without noise and with it, the gradients of the
update, what each of some cycles of waking up and falling asleep left; experience.pt with the
transfer dock's content at the end of the iteration.
"""

import driven
import torch
from driven import FOLDER
from reference import Place, drawn, shard

from mindspeed_qerl.ascend.rollout import RolloutState


def copied(tensors):
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


class Worker(driven.Worker):
    def _parameters(self):
        model = self.model[0]
        while not hasattr(model, "base_model"):
            model = model.module
        return dict(model.base_model.model.named_parameters())

    def _place(self):
        state = self.parallel_state
        layers = (
            self.megatron_config.num_layers // self.megatron_config.pipeline_model_parallel_size
        )
        return Place(
            state.get_tensor_model_parallel_rank(),
            state.get_tensor_model_parallel_world_size(),
            state.get_expert_model_parallel_rank(),
            state.get_expert_model_parallel_world_size(),
            layers * state.get_pipeline_model_parallel_rank(),
        )

    def load(self):
        content = torch.load(FOLDER / "full.pt", weights_only=False)
        for name, parameter in self._parameters().items():
            value = shard(name, content["full"], content["adapters"], self._place())
            assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
            parameter.data.copy_(value)
        self.optimizer.reload_model_params()

    def _copied(self):
        return copied(self._parameters())

    def level(self, noise_step):
        recipe = self.recipe
        return recipe.noise.noise_schedule(recipe.run.train_iters).level(noise_step)

    def prepare(self, noise_step):
        noise = None if noise_step is None else self.level(noise_step)
        self.inference_model.state = RolloutState("probe", 0, noise)

    def synced(self, noise_step):
        self.prepare(noise_step)
        self.sharding_manager.enter_infer_mode()
        weights = copied(dict(self.inference_model.model.named_parameters()))
        self.sharding_manager.exit_infer_mode()
        self.actor_offloader.onload_param()
        return weights

    def cycle(self, noise_step):
        """As between two steps: training weights out, vLLM's in, greedy answers with that
        noise, vLLM's out, and training's in again; what held memory while vLLM slept, and while
        it was awake.
        """
        rollout, worker = (
            self.inference_model,
            self.inference_model.llm.llm_engine.model_executor.driver_worker,
        )
        self.prepare(noise_step)
        self.sharding_manager.enter_infer_mode()
        held = [
            parameter.untyped_storage().size()
            for parameter in self._parameters().values()
            if parameter.requires_grad
        ]
        groups = rollout.sample([[5, 6, 7, 8], [9, 10, 11]], n=1, temperature=0.0, max_tokens=5)
        self.sharding_manager.exit_infer_mode()
        weights, container = (
            dict(rollout.model.named_parameters()),
            self.sharding_manager.vllm_weight_container,
        )
        found = {
            "answers": [drawn(answer) for [answer] in groups],
            "training_held": held,
            "caches": len(worker.worker.model_runner.kv_caches),
            "buffers": [buffer.memory_buffers for buffer in container.weight_buffers],
            "asleep": {
                name
                for name, parameter in weights.items()
                if parameter.data_ptr() == rollout.cpu_model[name].data_ptr()
            },
            "all": set(weights),
        }
        self.actor_offloader.onload_param()
        return found

    def look(self):
        """The syncs; then keep the gradients of the coming update."""
        self.load()
        self.seen = {"place": self._place(), "rank": self._rank, "train": self._copied()}
        self.seen["vllm"], self.seen["vllm_noisy"] = self.synced(None), self.synced(1)
        steps = {"clean": None, "noisy": 1}
        steps |= {"clean again": None, "other noise": 2, "noisy again": 1}
        self.seen["cycles"] = {name: self.cycle(step) for name, step in steps.items()}
        self.seen["train_after"] = self._copied()
        # the noise of step 1, where it is on: the policy that samples is not the one that is
        # trained
        apply = self.inference_model.injector.apply
        self.inference_model.injector.apply = lambda level: apply(self.level(level.step + 1))
        self.seen["rollouts"] = []
        rollout, sample = self.inference_model, self.inference_model.sample

        def keep_rollouts(prompts, **options):
            groups = sample(prompts, **options)
            if rollout.state.purpose == "rollout":
                for prompt, group in zip(prompts, groups):
                    routes = [getattr(answer, "routes", None) for answer in group]
                    self.seen["rollouts"].append((prompt, list(map(drawn, group)), routes))
            return groups

        rollout.sample = keep_rollouts
        step = self.optimizer.step

        def keep_gradients():
            trained = {n: p for n, p in self._parameters().items() if p.requires_grad}
            gradients = copied({name: p.main_grad for name, p in trained.items()})
            result = step()
            # of the first update, when the policy is still the old one
            self.seen.setdefault("gradients", gradients)
            self.seen.setdefault("grad_norm", result[1])
            return result

        self.optimizer.step = keep_gradients

    def save_seen(self):
        torch.save(self.seen, FOLDER / f"rank{self._rank}.pt")


class Trainer(driven.Trainer):
    def fit(self, data_iters):
        # the first step has no noise by its schedule
        self.observer.checks.check = lambda *_: []
        self.on_ranks("look")
        super().fit(data_iters)

    def log_metrics(self, metrics, iteration):
        self.on_ranks("save_seen")
        super().log_metrics(metrics, iteration)
