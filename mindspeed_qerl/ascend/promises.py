"""The table of the contract: each name, signature, registry and behaviour of upstream that we rely on, and the reason.

Upstream is extended from outside, so a change there can break us without an error: a hook that is no longer called, a registry
that is no longer read. What we replace has a `signature` or is Unchanged, what we call has a `called`, behaviour is a Source. No
clause without something of ours that needs it. Commits: PINS in contract.py. Kinds of clause: clauses.py.
"""

from mindspeed_qerl.ascend.clauses import Attributes, Class, Clause, Dictionary, Function, Globals, Source, Unchanged, Without
from mindspeed_qerl.recipe import keys

# The names that upstream's verifier() knows; any other it skips without a word, so names are checked against these first.
UPSTREAM_VERIFIERS = ("acc", "format", "step", "strict_format", "base_acc", "math_17k_acc", "acc_for_dapo", "acc_for_ppo",
                      "math_verify_reward", "retool_reward")

TRAIN = "cli/train_grpo.py"
CONFIGS = "mindspeed_rl/config_cls"
UTILS = "mindspeed_rl/utils/utils.py"
LAUNCHER = "mindspeed_rl/workers/scheduler/launcher.py"
START = (
    Function(TRAIN, "train", "we start this task, with our classes in its module", called="train(config)",
             decorator="ray.remote"),
    Globals(TRAIN, "train", "ours take the place of these", names=("IntegratedWorker", "RayGRPOTrainer", "RuleReward")),
    Globals(TRAIN, "parse_training_config", "ours, with more attributes, take the place of these",
            names=("MegatronConfig", "RLConfig")),
    Source(TRAIN, "parse_training_config", "our config files are valid upstream configs because sections are merged so",
           snippets=(
        "MegatronConfig({**config.get('megatron_training'), **config.get('actor_config')}, config.get('model'))",
        "RLConfig(config.get('rl_config'))", "GenerateConfig(config.get('generate_config'))")),
    Source(TRAIN, "train", "the launcher is imported inside the task, so it is changed in its own module",
           snippets=("from mindspeed_rl.workers.scheduler.launcher import RayActorGroup",)),
    Source(TRAIN, "train", "CPUs that are counted before Ray is asked for them", snippets=(
        "[{'CPU': rl_config.num_cpus_for_local_task} for _ in range(rule_reward_num_process)]",)),
    Source(TRAIN, "train", "the order of the start: rewards, the position in the data to resume at, the loop", snippets=(
        "rule_reward.initialize.remote(reward_config, rl_config, tokenizer, generate_config.trust_remote_code, dp_rank=i)",
        "actor_worker.get_consumed_train_samples()",
        "[next(data_iters) for _ in range(consumed_train_samples // actor_config.global_batch_size)]",
        "trainer.fit(data_iters)")),
    Source(TRAIN, "initialize_megatron", "argv is built before MindSpeed-LLM patches Megatron and Megatron parses it", snippets=(
        "parse_args_from_config(config)", "from mindspeed_llm.training.arguments import parse_args_decorator",
        "megatron.training.arguments.parse_args()")),
    Dictionary(TRAIN, "get_megatron_module.return", "what a worker has of Megatron as self.<name>", entries=dict.fromkeys((
        "parallel_state", "get_args", "save_checkpoint", "load_checkpoint", "setup_model_and_optimizer", "model_type"))),
    Source(TRAIN, "main", "we initialise Ray ourselves, with what upstream would have set", snippets=(
        "not ray.is_initialized()", "runtime_env['env_vars']['VLLM_DP_SIZE'] = str(generate_config.infer_expert_parallel_size)",
        "runtime_env['env_vars']['IS_MULTIMODAL'] = str(rl_config.is_multimodal)",
        "runtime_env['env_vars']['HCCL_BUFFSIZE'] = str(rl_config.hccl_buffersize)", "ray.get(train.remote(config))")),
    Source(f"{CONFIGS}/base_config.py", "BaseConfig.update",
           "a key it has no attribute for is refused, so ours must not be there", snippets=(
        "hasattr(self, key)", "setattr(self, key, value)")),
    # "model" is taken out by BaseConfig.update.
    Attributes(f"{CONFIGS}/megatron_config.py", "MegatronConfig", "keys of megatron_training and actor_config that we let pass",
               names=keys.MEGATRON_KEYS - {"model"}),
    Attributes(f"{CONFIGS}/rl_config.py", "RLConfig", "keys of rl_config that we let pass", names=keys.RL_KEYS),
    Attributes(f"{CONFIGS}/generate_config.py", "GenerateConfig", "keys of generate_config that we let pass",
               names=keys.GENERATE_KEYS),
    Source(UTILS, "parse_args_from_config",
           "a list becomes several words only as a ListConfig, true a flag, false and None nothing", snippets=(
        "isinstance(value, omegaconf.listconfig.ListConfig)", "sys.argv.append(f'{i}')", "isinstance(value, bool)",
        "value is None", "sys.argv.append(f'{value}')")),
    Globals(LAUNCHER, "get_rl_resource_by_worker_type", "our worker is added to it", names=("resource_mapping",)),
    Source(LAUNCHER, "get_rl_resource_by_worker_type", "a worker's NPUs are found by the name of its class",
           snippets=("worker.__ray_actor_class__.__name__", "resource_mapping.get(actor_class, lambda _: None)(rl_config)")),
    Dictionary(LAUNCHER, "resource_mapping", "our worker has the entry of the one it extends", entries={
        "IntegratedWorker.__ray_actor_class__.__name__": "lambda config: config.actor_resource"}),
    Source(LAUNCHER, "construct_placement_groups", "it waits for ever, so we prove first that its bundles fit", snippets=(
        "[{'NPU': 1, 'CPU': num_cpus} for _ in range(num_devices_per_node)]",
        "ray.util.placement_group(bundles, strategy='STRICT_PACK')", "ray.get(placement_group.ready())")),
    Source(LAUNCHER, "RayActorGroup.get_placement_group", "the CPUs that each rank asks for",
           snippets=("self.rl_config.num_cpus_for_placement_group",)),
    Source(LAUNCHER, "get_device_information", "how many NPUs upstream believes a node to have",
           snippets=("acl.rt.get_device_count()",)),
    Source(LAUNCHER, "RayActorGroup.create_actor_handlers", "a worker gets env_vars only, so it inherits our setup hook",
           snippets=(
        "self.worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=param.placement_group, "
        + "placement_group_bundle_index=param.bundle_index), runtime_env=runtime_env)",)),
    Function(LAUNCHER, "RayActorGroup.execute_sync_command", "how the trainer calls our worker's methods",
             called="execute_sync_command('evaluate', prompts, 1, 1.0, 0)"),
)

INTEGRATED = "mindspeed_rl/workers/integrated_worker.py"
ACTOR = "mindspeed_rl/workers/actor_hybrid_worker.py"
BASE_WORKER = "mindspeed_rl/workers/base_worker.py"
WORKER = "ActorHybridWorkerBase"
WORKERS = (
    Class(INTEGRATED, "IntegratedWorker", "we extend the class behind the actor", decorator="ray.remote(resources={'NPU': 0.7})",
          bases=(WORKER, "ReferenceWorkerBase", "RewardWorkerBase")),
    Source(INTEGRATED, "IntegratedWorker.initialize", "share_backbone: the reference is the actor's model with its adapters off",
           snippets=("ActorHybridWorkerBase.initialize(self)", "self.ref_model = self.model")),
    Function(INTEGRATED, "IntegratedWorker.compute_ref_log_prob", "extended: expert adapters are off around it",
             signature="self"),
    Source(INTEGRATED, "IntegratedWorker.compute_ref_log_prob", "it turns off PEFT's layers only; the experts' are left to us",
           snippets=(
        "with self.ref_model[0].module.module.disable_adapter():\n    ReferenceWorkerBase.compute_ref_log_prob(self)",)),
    Class(ACTOR, WORKER, "its methods are extended", bases=("BaseWorker",)),
    Source(ACTOR, f"{WORKER}.initialize", "the order of the moments that we hook", snippets=(
        "self.setup_distributed_rank()", "self._build_model_optimizer()", "self._build_rollout()",
        "self._build_sharding_manager()")),
    Source(ACTOR, f"{WORKER}._build_model_optimizer", "the step of the noise schedule comes from the checkpoint", snippets=(
        "self.setup_model_and_optimizer(self.model_provider, self.model_type.encoder_or_decoder)",
        "self.iteration = self.get_iteration()")),
    Function(ACTOR, f"{WORKER}._build_rollout", "extended: AQN is hooked to the engine that it returns", signature="self"),
    Globals(ACTOR, f"{WORKER}._build_rollout", "our engine takes its place", names=("VLLMInferEngine",)),
    Source(ACTOR, f"{WORKER}._build_rollout",
           "afterwards actor_model_config names no targets: the container sees a model without LoRA", snippets=(
        "self.actor_model_config.lora_r = self.megatron_config.lora_r",
        "self.actor_model_config.lora_alpha = self.megatron_config.lora_alpha",
        "self.actor_model_config.lora_target_modules = self.megatron_config.lora_target_modules")),
    Function(ACTOR, f"{WORKER}._build_sharding_manager", "extended: adaptors are registered before it", signature="self"),
    Globals(ACTOR, f"{WORKER}._build_sharding_manager", "built from the module's name", names=("MegatronShardingManager",)),
    Source(ACTOR, f"{WORKER}._build_sharding_manager", "the container gets the config that we converted",
           snippets=("self.actor_model_config", "self.inference_model")),
    Function(ACTOR, f"{WORKER}.generate_sequences", "extended: the step of the noise before, its report after", signature="self"),
    Source(ACTOR, f"{WORKER}.generate_sequences", "one weight sync, so one noise, in an iteration", snippets=(
        "self.sharding_manager.enter_infer_mode()",
        "self.sync_generate_process(batch_data, experience_count, index, pad_token_id)",
        "self.sharding_manager.exit_infer_mode()")),
    Source(ACTOR, f"{WORKER}.sync_generate_process", "prompts reach the engine as token ids",
           snippets=("self.actor_hybrid.generate_sequences(copy.deepcopy(prompts_list), extra_info=batch_data)",)),
    Source("mindspeed_rl/models/actor_rollout_hybrid.py", "ActorRolloutHybrid.generate_sequences",
           "token ids are kept, logprobs dropped", snippets=(
        "self.inference_actor.generate_sequences(prompts_list, **kwargs)[0]",)),
    Source(ACTOR, f"{WORKER}.update", "the step of the noise schedule grows by one with each update",
           snippets=("self.actor_hybrid.update_actor(batch_data, kl_ctrl)", "self.iteration += 1")),
    Source(ACTOR, f"{WORKER}.save_ckpt", "what a checkpoint holds", snippets=(
        "self.save_checkpoint(iteration, self.model, self.optimizer, self.opt_param_scheduler, "
        + "self.num_floating_point_operations_so_far)",)),
    Source(ACTOR, f"{WORKER}.get_iteration", "a resumed run goes on at the checkpoint's step",
           snippets=("return self.args.iteration",)),
    Function(ACTOR, f"{WORKER}.get_consumed_train_samples", "overridden: prompts are counted by iterations, not by dispatches",
             signature="self"),
    Function(BASE_WORKER, "BaseWorker.setup_distributed_rank", "extended: the expert class is put in place after it",
             signature="self"),
    Source(BASE_WORKER, "BaseWorker.setup_distributed_rank",
           "Megatron gets a copy of the config, and is initialised before a model is built", snippets=(
        "config = copy.deepcopy(self.megatron_config)", "self.initialize_func(config=config)", "self.get_megatron_module()",
        "setattr(self, key, value)", "self.args = self.get_args()")),
    Attributes(BASE_WORKER, "BaseRayWorker", "evaluation deals prompts by rank", names=frozenset({"_rank", "_world_size"})),
    Source("mindspeed_rl/models/rollout/vllm_adapter/vllm_parallel_state.py", "initialize_model_parallel_for_vllm",
           "inference TP groups are neighbouring ranks, so rank // tp is the group", snippets=(
        "list(range(i * infer_tensor_model_parallel_size, (i + 1) * infer_tensor_model_parallel_size))",)),
    Function("mindspeed_rl/workers/resharding/megatron_off_loader.py", "MegatronOffLoader.onload_param",
             "training weights come back after an evaluation", called="onload_param()"),
)

RULE_REWARD = "mindspeed_rl/workers/rule_reward.py"
VERIFIER = "mindspeed_rl/models/rule_verifier.py"
REWARD = (
    Class(RULE_REWARD, "RuleReward", "we extend the class behind the actor", bases=("object",), decorator="ray.remote"),
    Function(RULE_REWARD, "RuleReward.initialize", "extended: our verifier is put in place",
             signature="self, megatron_config, rl_config, tokenizer, trust_remote_code=False, dp_rank=0"),
    Source(RULE_REWARD, "RuleReward.compute_rm_score", "scores and their metrics reach the transfer dock", snippets=(
        "compute_verifier_score(batch_data, self.megatron_config, self.rl_config, self.hf_tokenizer, ignore_token)",
        "ray.get(self.td.update_metrics.remote(key, value=value, cumulate=True))", "output = {'rm_scores': rm_scores}")),
    Globals(VERIFIER, "compute_verifier_score", "replacing rule_verifier.verifier is enough", names=("verifier",)),
    Source(VERIFIER, "compute_verifier_score", "responses and labels arrive as text, without padding and special tokens",
           snippets=(
        "torch.where(batch['responses'] == ignore_token, tokenizer.eos_token_id, batch['responses'])",
        "tokenizer.batch_decode(responses, skip_special_tokens=True)",
        "extra_data[k] = tokenizer.batch_decode(batch[k], skip_special_tokens=True)",
        "scores, metrics = verifier(str_responses, extra_data, rl_config)")),
    Function(VERIFIER, "verifier", "ours takes its place, and calls it for upstream's names",
             signature="responses, data, config, **kwargs"),
    Dictionary(VERIFIER, "verifier.rule_verifier_function", "the known names", entries=dict.fromkeys(UPSTREAM_VERIFIERS),
               exactly=True),
    Source(VERIFIER, "verifier", "how a verifier is called, weighted and named in the metrics; an unknown one is skipped",
           snippets=(
        "labels = data['labels']", "if fun_verifier not in rule_verifier_function:\n    continue",
        "rule_verifier_function[fun_verifier](sequences=responses, answers=labels, tool_call_nums=tool_call_nums)",
        "metrics[f'{fun_verifier}_rewards/mean'] = scores",
        "[all_score + tmp_score * verifier_weight[idx] for all_score, tmp_score in zip(rewards, scores)]")),
)

SHARDING = "mindspeed_rl/workers/resharding/megatron_sharding_manager.py"
CONTAINER = "mindspeed_rl/workers/resharding/vllm_weight_container.py"
ADAPTOR = "mindspeed_rl/workers/resharding/weight_adaptor.py"
BUFFER = "mindspeed_rl/workers/resharding/memory_buffer.py"
WEIGHTS = "MegatronStyleVllmWeightContainer"
QWEN2_MOE = frozenset({"Qwen2MoeForCausalLM", "CustomQwen2MoeForCausalLM"})
ADJUSTED = "self.weight_adaptor.adjust_megatron_param_dict(megatron_params_dict[vpp_rank], self._tp_size)"
SYNC = (
    Globals(SHARDING, "MegatronShardingManager.__init__", "our container takes its place", names=(WEIGHTS, "get_weight_adaptor")),
    Source(SHARDING, "MegatronShardingManager.__init__", "the adaptor is chosen by the name of vLLM's model class",
           snippets=("get_weight_adaptor(self.inference_engine.model.__class__.__name__)", "weight_adaptor(model_config)")),
    Source(SHARDING, "MegatronShardingManager.enter_infer_mode", "new buffers, gather, offload, sync: the noise follows the last",
           snippets=(
        "self.onload_infer_params()", "infer_params = self.vllm_weight_container.get_infer_params()",
        "self.megatron_offloader.offload_param()",
        "self.inference_engine.sync_model_weights(infer_params, load_format='megatron')")),
    Source(SHARDING, "MegatronShardingManager.exit_infer_mode", "noisy weights are dropped, not carried over",
           snippets=("self.inference_engine.offload_model_weights()", "self.offload_infer_params()")),
    Source(CONTAINER, f"{WEIGHTS}._validate_parallel_config", "the layout rules refuse the same before anything starts",
           snippets=(
        "self._infer_pp_size != 1", "self._infer_ep_size % self._ep_size != 0",
        "self._ep_size > 1 and not self.moe_tp_extend_ep")),
    Source(CONTAINER, f"{WEIGHTS}.get_infer_params", "experts are copied only with moe_tp_extend_ep", snippets=(
        "self._update_weight_buffers_intra_pp()", "self.moe_tp_extend_ep and self._infer_ep_size >= self._ep_size",
        "self._update_weight_buffers_ep()", "self._send_receive_experts()")),
    Function(CONTAINER, f"{WEIGHTS}._unwrap_megatron_model", "extended: it returns the chunks by their names without LoRA",
             signature="self, model"),
    Source(CONTAINER, f"{WEIGHTS}._unwrap_megatron_model", "without a list of targets PEFT's wrapper stays on, and we take it off",
           snippets=("isinstance(self.model_config.lora_target_modules, list)", "model_chunk = model_chunk.base_model.model")),
    Source(CONTAINER, f"{WEIGHTS}._update_weight_buffers_intra_pp", "each weight is read from the adaptor's dictionary, which merges it",
           snippets=(
        ADJUSTED, "(self._infer_ep_size > 1 or self._ep_size > 1) and 'mlp.experts' in megatron_name",
        "megatron_param = megatron_params_dict[vpp_rank][megatron_name]", "weight_buffer.copy_by_name(hf_name, param)",
        "self.model_config.lora_target_modules and '.base_layer.weight' in megatron_name")),
    Source(CONTAINER, f"{WEIGHTS}._update_weight_buffers_ep", "experts are read from the adaptor's dictionary, which merges them",
           snippets=(
        ADJUSTED, "megatron_param = megatron_params_dict[vpp_rank][megatron_name]",
        "self.experts_memory_buffers[dtype].copy_by_name_smallershape(hf_name, megatron_param, expert_pernode)")),
    Source(CONTAINER, f"{WEIGHTS}.split_tp_params", "gate and up are split each for itself",
           snippets=("'linear_fc1.weight' in name",)),
    Source(CONTAINER, f"{WEIGHTS}._default_tp_concat_fn", "and joined each for itself",
           snippets=("'projector' not in name and 'linear_fc1' in name",)),
    Dictionary(ADAPTOR, "WEIGHT_ADAPTOR_REGISTRY", "our adaptors extend these and are registered under their names", entries={
        "Qwen2ForCausalLM": "QwenMVWeightAdaptor", "Qwen3ForCausalLM": "Qwen3MvWeightAdaptor",
        "Qwen3MoeForCausalLM": "Qwen3MoeMVWeightAdaptor"}, absent=QWEN2_MOE),
    Globals(ADAPTOR, "get_weight_adaptor", "the registry is read at each call", names=("WEIGHT_ADAPTOR_REGISTRY",)),
    *(Class(ADAPTOR, name, "our adaptor extends it", bases=("MegatronVLLMWeightAdaptor",))
      for name in ("QwenMVWeightAdaptor", "Qwen3MvWeightAdaptor", "Qwen3MoeMVWeightAdaptor")),
    *(Function(ADAPTOR, f"MegatronVLLMWeightAdaptor.{name}", "extended", signature=signature) for name, signature in (
        ("__init__", "self, model_config"), ("replace_name_i2t", "self, inference_name"),
        ("adjust_megatron_param_dict", "self, param_dict, train_tp_size"))),
    Source(ADAPTOR, "MegatronVLLMWeightAdaptor.replace_name_i2t", "no .base_layer in the names unless the targets are a list",
           snippets=(
        "isinstance(self.model_config.lora_target_modules, list)",
        "param_name.replace(lora_target_module, lora_target_module + '.base_layer')")),
    *(Without(ADAPTOR, f"{name}.replace_name_i2t", "nor here", word="base_layer")
      for name in ("Qwen3MvWeightAdaptor", "Qwen3MoeMVWeightAdaptor")),
    Source(ADAPTOR, "Qwen3MoeMVWeightAdaptor.__init__", "the mapping that Qwen2-MoE's adds to", snippets=(
        "('self_attention.linear_qkv', 'self_attn.qkv_proj')", "('self_attention.linear_proj', 'self_attn.o_proj')",
        "('mlp.experts.weight1', 'mlp.experts.w13_weight')", "('mlp.experts.weight2', 'mlp.experts.w2_weight')",
        "('mlp.router', 'mlp.gate')")),
    Source(BUFFER, "MemoryBuffer.__init__", "vLLM's weights have memory of their own, zero before a sync", snippets=(
        "torch.zeros(self.numel_padded, dtype=self.dtype, device=torch.cuda.current_device(), requires_grad=False)",)),
    Source(BUFFER, "MemoryBuffer.copy_by_name", "filled by copy, so noise never reaches training",
           snippets=("buffer_tensor.copy_(param)",)),
    Source(BUFFER, "ModelWeightBuffer.rebuild", "new at each sync, so noise does not add up",
           snippets=("self.memory_buffers = build_memory_buffer(self.weight_buffer_meta)",)),
    Source(BUFFER, "ModelWeightBuffer.destroy", "new at each sync, so noise does not add up",
           snippets=("self.memory_buffers = None",)),
)

ENGINE = "mindspeed_rl/models/rollout/vllm_engine.py"
LOADERS = "mindspeed_rl/models/rollout/vllm_adapter/megatron_weight_loaders.py"
ROLLOUT = (
    Class(ENGINE, "VLLMInferEngine", "our engine extends it", bases=("BaseInferEngine",)),
    Attributes(ENGINE, "VLLMInferEngine", "what our engine and AQN read", names=frozenset({"llm", "model", "sampling_params"})),
    Function(ENGINE, "VLLMInferEngine.sync_model_weights", "extended: the noise follows it",
             signature="self, params, load_format='megatron'"),
    Source(ENGINE, "VLLMInferEngine.sync_model_weights", "it loads into the model that AQN walks",
           snippets=("load_megatron_weights(params, self.model, infer_parallel_config, self.hf_config)",)),
    Function(ENGINE, "VLLMInferEngine.offload_model_weights", "extended: the noise goes before it", signature="self"),
    Unchanged(ENGINE, "VLLMInferEngine.generate_sequences", "written again, with prompts as token ids instead of text",
              digest="bfd4a07bd3d7"),
    *(Function(ENGINE, f"VLLMInferEngine.{call.partition('(')[0]}", "called by our generate_sequences", called=call) for call in (
        "init_cache_engine()", "free_cache_engine()", "update_sampling_params(n=1, temperature=0.0)",
        "_post_process_outputs(response)")),
    Source(ENGINE, "VLLMInferEngine.update_sampling_params", "changes self.sampling_params and changes it back",
           snippets=("setattr(self.sampling_params, key, value)", "yield", "setattr(self.sampling_params, key, value)")),
    Source(ENGINE, "VLLMInferEngine._post_process_outputs", "one row for each completion",
           snippets=("output_token_ids.append(torch.tensor(output.token_ids))", "return output_token_ids, logprobs")),
    Dictionary(LOADERS, "MODEL_MEGATRON_WEIGHT_LOADER_REGISTRY", "Qwen2-MoE is added with the loader of the others", entries={
        "Qwen2ForCausalLM": "qwen_megatron_weight_loader", "Qwen3ForCausalLM": "qwen_megatron_weight_loader",
        "Qwen3MoeForCausalLM": "qwen_megatron_weight_loader"}, absent=QWEN2_MOE),
    Globals(LOADERS, "_get_model_weight_loader", "the registry is read at each call",
            names=("MODEL_MEGATRON_WEIGHT_LOADER_REGISTRY",)),
    Function(LOADERS, "qwen_megatron_weight_loader", "serves Qwen2-MoE too",
             signature="actor_weights, vllm_model, infer_paralle_config, hf_config"),
    Source(LOADERS, "qwen_megatron_weight_loader", "names that vLLM lacks are skipped, q, k and v are regrouped", snippets=(
        "if name not in params_dict.keys():\n    continue", "qkv_split_weight(loaded_weight, infer_paralle_config, hf_config)",
        "hf_config.num_experts // infer_paralle_config.infer_expert_parallel_size",
        "load_single_weight(params_dict, name, loaded_weight)")),
    *(Source(LOADERS, name, "vLLM's parameters become views of the buffers", snippets=("param.data = loaded_weight.data",))
      for name in ("default_weight_loader", "parallel_weight_loader")),
)

TRAINER = "mindspeed_rl/trainer/grpo_trainer_hybrid.py"
DOCK = "mindspeed_rl/trainer/utils/transfer_dock.py"
STRATEGY = "mindspeed_rl/trainer/utils/data_strategy.py"
DATASETS = "mindspeed_rl/datasets"
LOOP = (
    Class(TRAINER, "RayGRPOTrainer", "our trainer extends it", bases=("RayBaseTrainer",)),
    Function(TRAINER, "RayGRPOTrainer.__init__", "how train builds it; rl_config carries our settings as qerl", called=(
        "trainer(actor_worker, ref_worker, reward_list, tokenizer=None, global_batch_size=1, micro_batch_size=1, train_iters=1, "
        "save_interval=1, dataset_additional_keys=None, qerl=None)")),
    Globals(TRAINER, "RayGRPOTrainer.__init__", "ours, which keeps the experience, takes its place", names=("DataStrategy",)),
    Function(TRAINER, "RayGRPOTrainer.fit", "extended: an evaluation comes before it", signature="self, data_iters"),
    Source(TRAINER, "RayGRPOTrainer.fit", "one iteration, in the order in which we listen", snippets=(
        "iteration = self.actor_worker.get_iteration()", "self.data_strategy.put_experience(batch_dict, indexes, is_prompt=True)",
        "self.actor_worker.generate_sequences(blocking=self.blocking)",
        "self.compute_advantage(blocking=True, guarantee_order=self.guarantee_order)",
        "self.ref_worker.compute_ref_log_prob(blocking=self.blocking)",
        "if self.ref_worker.megatron_config.lora_target_modules:\n    self.ref_worker.wait_all_ref_objs_run_over()",
        "if not self.skip_actor_log_prob:\n    self.actor_worker.compute_log_prob(blocking=self.blocking)",
        "self.actor_worker.update(self.kl_ctrl, self.skip_actor_log_prob)", "metrics_result = self.data_strategy.get_metrics()",
        "metrics_result = metrics_post_processing(metrics_result)", "iteration += 1", "self.data_strategy.clear_main()",
        "if self.wandb is not None:\n    self.wandb.log_metrics(metrics.metric, iteration)",
        "if iteration % self.save_interval == 0 or iteration == self.train_iters:\n    self.save_checkpoint(iteration)")),
    Source(TRAINER, "RayGRPOTrainer.compute_advantage", "CPUs that are counted before Ray is asked for them",
           snippets=("compute_advantage.options(num_cpus=self.num_cpus_for_local_task)",)),
    Source("mindspeed_rl/trainer/base.py", "RayBaseTrainer.__init__",
           "wandb is an attribute that we take; TensorBoard needs it to be None", snippets=(
        "self.wandb = None", "kwargs.get('use_tensorboard', '') and self.wandb is None")),
    Function(STRATEGY, "DataStrategy.clear_main", "extended: the experience is kept before it", signature="self, consumer=None"),
    Function(STRATEGY, "DataStrategy.td", "the transfer dock", called="td()", decorator="property"),
    Class(DOCK, "GRPOTransferDock", "an actor with TransferDock's methods; its 10 CPUs are counted before Ray is asked for them",
          bases=("TransferDock",),
          decorator="ray.remote(max_concurrency=100, num_cpus=10)"),
    Function(DOCK, "TransferDock.get_experience_data", "the columns of an iteration, read back whole",
             called="get_experience_data()"),
    Source(DOCK, "GRPOTransferDock.__init__", "the columns that we read",
           snippets=("'prompts'", "'responses'", "'labels'", "'rm_scores'", "'old_log_prob'", "'ref_log_prob'", "'advantages'")),
    Function(DOCK, "GRPOTransferDock.update_metrics", "our metrics travel by it",
             called="update_metrics('aqn/sigma', value=[0.1], cumulate=True)"),
    Function(DOCK, "GRPOTransferDock.get_experience", "how workers get their part",
             called="get_experience('actor_train', [], 4, indexes=[0])"),
    Function(DOCK, "put_prompts_experience", "each prompt becomes n rows", called="put_prompts_experience(batch, 8, ['labels'])"),
    *(Source(file, name, "metrics that the run directory has under names of its own",
             snippets=snippets) for file, name, snippets in (
        ("mindspeed_rl/models/loss/grpo_actor_loss_func.py", "GRPOActorLossFunc.compute_loss",
         ("'actor/pg_loss'", "'actor/pg_clipfrac'", "'actor/kl_loss'")),
        ("mindspeed_rl/models/base/base_training_engine.py", "BaseTrainingEngine.update", ("f'{self.role}/grad_norm'",)),
        ("mindspeed_rl/trainer/utils/compute_utils.py", "compute_grpo_data_metrics", ("'response_length/mean'",)),
        (ACTOR, f"{WORKER}.update", ("'actor/lr'", "'timing/update'")),
        (ACTOR, f"{WORKER}.generate_sequences", ("'timing/rollout'", "'timing/resharding_to_infer'")))),
    Source("mindspeed_rl/utils/metrics.py", "Metric.update", "the values of several ranks become one list",
           snippets=("self.metric[key].extend(value)", "self.metric[key] = [*value]")),
    Source(UTILS, "metrics_post_processing", "and that list its mean, unless the name says timing",
           snippets=("'timing' in key", "metrics.compute_mean(key, value)")),
    Source(f"{DATASETS}/indexed_dataset.py", "get_packed_indexed_dataset", "the names of the files that convert_gsm8k writes",
           snippets=("f'{data_prefix}_packed_*_document*'", "f'{data_prefix}_packed_{field}_document'")),
    Source(f"{DATASETS}/indexed_dataset.py", "", "the first bytes of an index file",
           snippets=(r"_INDEX_HEADER = b'MMIDIDX\x00\x00'",)),
    Source(f"{DATASETS}/prompt_dataset.py", "PromptDataset._cut_instruction_token", "labels are handed on as they are",
           snippets=("prompt_ids = item['input_ids']", "add_vals[add_keys] = item[add_keys]")),
    Source("megatron/core/datasets/indexed_dataset.py", "IndexedDatasetBuilder.add_document", "the writer that ours must equal",
           snippets=("self.sequence_lengths.extend(lengths)", "self.document_indices.append(len(self.sequence_lengths))")),
)

EXPERTS = "mindspeed_llm/tasks/posttrain/lora/moe/experts.py"
LLM_MOE = "mindspeed_llm/core/transformer/moe/moe_layer.py"
LORA = "mindspeed_llm/features_manager/finetune/lora.py"
LORA_UTILS = "mindspeed_llm/tasks/posttrain/lora/utils.py"
CHECKPOINT = "mindspeed_llm/training/checkpointing.py"
EXTEND_EP = "mindspeed/features_manager/moe/tp_extend_ep.py"
TP_TO_EP = "mindspeed/core/transformer/moe/moe_feature/tp_extend_ep"
STATE = "megatron/core/parallel_state.py"
EXPERT_TP = "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE"
LORA_AND_EXPERTS = (
    Class(EXPERTS, "LoraParallelGroupedMLP", "our experts extend it", bases=("GroupedMLP",)),
    Attributes(EXPERTS, "LoraParallelGroupedMLP", "the adapters, their scale, the activation", names=frozenset({
        "weight1_lora_a", "weight1_lora_b", "weight2_lora_a", "weight2_lora_b", "lora_r", "scaling", "expert_parallel",
        "activation_func_with_probs"})),
    Unchanged(EXPERTS, "LoraParallelGroupedMLP.__init__",
              "the shapes that are merged; allreduce on two of four, which we set on all", digest="da3a4f6848ed"),
    Unchanged(EXPERTS, "LoraParallelGroupedMLP.forward", "written again: scaling * a @ b for each expert, with a switch",
              digest="d18f57df574e"),
    Unchanged(LLM_MOE, "lora_moe_layer_init", "it builds the experts, and at TP > 1 the wrong dispatcher", digest="26601ad6a2be"),
    Source(LLM_MOE, "lora_moe_layer_init", "imported at each call, so our class in that module is used", snippets=(
        "from mindspeed_llm.tasks.posttrain.lora.moe.experts import LoraParallelGroupedMLP",
        "self.experts = LoraParallelGroupedMLP(self.num_local_experts, self.config, lora_config)")),
    Globals(LLM_MOE, "lora_moe_layer_init", "the TP-to-EP dispatcher takes its place", names=("MoEAlltoAllSEQTokenDispatcher",)),
    Source(LORA, "LoraFeature.register_patches", "model, experts and checkpoints of LoRA come from MindSpeed-LLM", snippets=(
        "patch_manager.register_patch('megatron.training.training.get_model', get_model_wrapper)",
        "patch_manager.register_patch('megatron.training.checkpointing._load_base_checkpoint', _load_base_checkpoint_wrapper)",
        "patch_manager.register_patch('megatron.training.checkpointing.save_checkpoint', save_checkpoint_wrapper)",
        "patch_manager.register_patch('megatron.core.transformer.moe.moe_layer.MoELayer.__init__', lora_moe_layer_init)")),
    Without(LORA, "LoraFeature.validate_args", "later versions refuse LoRA with moe_tp_extend_ep, which the weight sync needs",
            word="moe_tp_extend_ep"),
    Source(LORA, "LoraFeature.validate_args", "our check of the config asks for the same dispatcher",
           snippets=("args.moe_token_dispatcher_type != 'alltoall_seq'",)),
    Source(LORA, "LoraFeature.register_args", "the arguments that the lora_ keys become",
           snippets=("'--lora-target-modules'", "'--lora-load'", "'--lora-r'", "'--lora-alpha'", "'--lora-ckpt-filter'")),
    Source("mindspeed_llm/training/arguments.py", "", "Qwen2-MoE's gate on the shared expert",
           snippets=("'--shared-expert-gate'",)),
    Source("mindspeed_llm/training/training.py", "model_provider_func_wrapper", "dense adapters are PEFT's, on the same targets",
           snippets=("args.lora_target_modules", "get_peft_model(model, lora_config)")),
    Source(LORA_UTILS, "is_enable_lora", "LoRA is on when there are targets",
           snippets=("hasattr(args, 'lora_target_modules') and args.lora_target_modules",)),
    Source(LORA_UTILS, "filter_lora_keys", "a filtered checkpoint keeps every name with lora in it, the experts' too",
           snippets=("{key: value for key, value in model_dict.items() if 'lora' in key.lower()}",)),
    Source(CHECKPOINT, "save_checkpoint_wrapper", "lora_ckpt_filter",
           snippets=("if args.lora_ckpt_filter:\n    state_dict = filter_lora_keys(state_dict)",)),
    Source(CHECKPOINT, "_load_base_checkpoint_wrapper", "a filtered checkpoint resumes from lora_load, over the weights in load",
           snippets=(
        "modify_keys_with_dict(state_dict, words_to_match, exclude_words)",
        "not args_.lora_load or getattr(args_, 'is_load_refer', False)", "fn(args_.lora_load, args_, rank0)",
        "merge_dicts(state_dict, state_dict_lora)")),
    Source("megatron/training/checkpointing.py", "load_checkpoint", "step and optimizer state come from load, never from lora_load: we link "
           "them there", snippets=(
        "tracker_filename = get_checkpoint_tracker_filename(load_dir)", "iteration, release = read_metadata(tracker_filename)",
        "model_checkpoint_name = get_checkpoint_name(load_dir, iteration, release)")),
    Source(EXTEND_EP, "MoETpExtendEpFeature.validate_args", "our check of the config refuses the same", snippets=(
        "args.num_experts % (args.tensor_model_parallel_size * args.expert_model_parallel_size) != 0",
        "args.moe_permutation_async_comm and args.moe_grouped_gemm")),
    Source(EXTEND_EP, "MoETpExtendEpFeature.register_patches", "the router is MindSpeed's, for the tokens of one TP rank",
           snippets=(
        "patch_manager.register_patch('megatron.core.transformer.moe.router.TopKRouter.routing', routing_tp_extend_ep)",)),
    Class("mindspeed/core/transformer/moe/moe_feature/adaptor.py", "MindSpeedMOEAlltoAllSEQTptoEpTokenDispatcher",
          "for experts at TP > 1", bases=("All2AllSeqTp2epDispatcherImpl", "MegatronMoEAlltoAllSEQTokenDispatcher")),
    Function(f"{TP_TO_EP}/token_dispatcher.py", "All2AllSeqTp2epDispatcherImpl.__init__", "lora_moe_layer_init builds it",
             called="dispatcher(num_local_experts, local_expert_indices, config=config)"),
    Source(f"{TP_TO_EP}/experts.py", "TpExtendEpGmmExpertsImpl.__init__",
           "how MindSpeed keeps experts whole; ours are kept so too", snippets=(
        f"parallel_state.{EXPERT_TP} = 1", "super().__init__(num_local_experts, config)",
        f"parallel_state.{EXPERT_TP} = tp_size")),
    Function("mindspeed/core/transformer/moe/grouped_gemm_util.py", "Ops.gmm", "the experts' product",
             called="gmm(x, weights, tokens_per_expert, trans_b=False)"),
    Source(STATE, "", "not set at first", snippets=(f"{EXPERT_TP} = None",)),
    Source(STATE, "get_expert_tensor_parallel_world_size", "once set, it goes before the size of the group",
           snippets=(f"if {EXPERT_TP} is not None:\n    return {EXPERT_TP}",)),
    Source("megatron/core/transformer/moe/experts.py", "GroupedMLP.__init__", "the base weights have that size too",
           snippets=("tp_size = parallel_state.get_expert_tensor_parallel_world_size()",)),
    Attributes("megatron/core/transformer/moe/shared_experts.py", "SharedExpertMLP", "Qwen2-MoE's gate goes to vLLM by this name",
               names=frozenset({"gate_weight"})),
    Source("megatron/core/distributed/distributed_data_parallel.py", "DistributedDataParallel.__init__",
           "allreduce=False: averaged among ranks with the same experts", snippets=("getattr(param, 'allreduce', True)",)),
    Source("megatron/core/optimizer/__init__.py", "_get_param_groups", "allreduce=False: a group of its own in the optimizer",
           snippets=("not getattr(param, 'allreduce', True)",)),
    Source("megatron/core/tensor_parallel/layers.py", "param_is_not_tensor_parallel_duplicate",
           "tensor_model_parallel=True: in the gradient norm of each TP rank", snippets=(
        "hasattr(param, 'tensor_model_parallel') and param.tensor_model_parallel",)),
)

NORM = "vllm_ascend/ops/layernorm.py"
ASCEND = (
    Class(NORM, "AscendRMSNorm", "AQN finds norms by the name of their class", bases=("RMSNorm",)),
    Source(NORM, "AscendRMSNorm.forward_oot",
           "the kernel reads the weight at each call, so it sees noise that is put on in place", snippets=(
        "torch_npu.npu_rms_norm(x, self.weight, self.variance_epsilon)",)),
    Source(NORM, "_addrmsnorm_forward_oot", "the same, with the residual added",
           snippets=("torch_npu.npu_add_rms_norm(x, residual, self.weight, self.variance_epsilon)",)),
    Unchanged("vllm_ascend/ops/common_fused_moe.py", "AscendUnquantizedFusedMoEMethod.process_weights_after_loading",
              "expert weights are transposed once, at the first load: then they lie as Megatron's do", digest="0ae9bbfcf8d8"),
    Source("vllm_ascend/envs.py", "", "weights in FRACTAL_NZ cannot be updated, so the engine sets it to 0",
           snippets=("int(os.getenv('VLLM_ASCEND_ENABLE_NZ', 1))",)),
    Source("vllm_ascend/worker/worker_v1.py", "NPUWorker.compile_or_warm_up_model",
           "it reseeds torch, so noise has its own generator", snippets=("NPUPlatform.seed_everything(self.model_config.seed)",)),
)

CONTRACT: tuple[Clause, ...] = START + WORKERS + REWARD + SYNC + ROLLOUT + LOOP + LORA_AND_EXPERTS + ASCEND
