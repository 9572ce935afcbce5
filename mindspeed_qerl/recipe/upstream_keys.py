"""The keys MindSpeed-RL accepts in each section, at commit 05a90d7 (config_cls/{megatron,rl,generate}_config.py).

Upstream raises on any other key (base_config.py:32). With this list a misspelt key is an error on every engine, and a key that the
local engine has no use for is named in one warning.
"""

MEGATRON_KEYS = frozenset("""
    accumulate_allreduce_grads_in_fp32 adam_beta1 adam_beta2 add_qkv_bias ai_framework algorithm attention_bias
    attention_dropout attention_mask_type attention_softmax_in_fp32 beta_fast beta_slow bf16 clip_grad coc_fused_kernel
    coc_mode coc_parallel_num context_parallel_algo context_parallel_size data_path dataloader_type dataset_additional_keys
    ddp_bucket_size disable_bias_linear distributed_backend do_sample dpo_loss_type enable_high_availability eval_interval
    eval_iters expert_model_parallel_size ffn_hidden_size finetune first_k_dense_replace full_shuffle_instruction_dataset
    gemm_gradient_accumulation_fusion global_batch_size group_query_attention hidden_dropout hidden_size high_freq_factor
    init_method_std initial_loss_scale is_instruction_dataset is_pairwise_dataset kv_channels kv_lora_rank load
    load_checkpoint_loosely log_interval log_throughput lora_alpha lora_ckpt_filter lora_fusion lora_r lora_target_modules
    low_freq_factor lr lr_decay_style lr_warmup_fraction make_vocab_size_divisible_by max_position_embeddings
    micro_batch_size min_lr mm_model model moe_alltoall_overlap_comm moe_aux_loss_coeff moe_ffn_hidden_size moe_grouped_gemm
    moe_layer_freq moe_permutation_async_comm moe_router_enable_expert_bias moe_router_group_topk
    moe_router_load_balancing_type moe_router_num_groups moe_router_score_function moe_router_topk
    moe_router_topk_scaling_factor moe_token_dispatcher_type moe_tp_extend_ep multi_latent_attention n_shared_experts
    no_bias_dropout_fusion no_check_for_nan_in_loss_and_grad no_gradient_accumulation_fusion no_load_optim no_load_rng
    no_masked_softmax_fusion no_pad_to_seq_lengths no_save_optim no_save_rng no_shared_storage no_shuffle noop_layers
    norm_epsilon norm_topk_prob normalization npu_deterministic num_attention_heads num_experts num_layer_list num_layers
    num_layers_per_virtual_pipeline_stage num_query_groups num_workers optimizer original_max_position_embeddings
    overlap_grad_reduce overlap_param_gather pad_to_multiple_of padded_vocab_size pipeline_model_parallel_size
    position_embedding_type pretrained_checkpoint prompt_type prompt_type_path q_lora_rank qk_head_dim qk_layernorm
    qk_pos_emb_head_dim recompute_activation_function recompute_granularity recompute_method recompute_num_layers ref_model
    refer_model_iter reset_attention_mask reset_position_ids reuse_fp32_param rope_scaling_factor rope_scaling_mscale
    rope_scaling_mscale_all_dim rope_scaling_original_max_position_embeddings rope_scaling_type rotary_base save
    save_interval seed seq_aux seq_length sequence_parallel shape_order skip_train spec split stage swap_attention
    swap_optimizer swiglu tensor_model_parallel_size tokenizer_name_or_path tokenizer_not_use_fast tokenizer_padding_side
    tokenizer_type train_iters transformer_impl untie_embeddings_and_output_weights use_ascend_coc use_cp_send_recv_overlap
    use_distributed_optimizer use_flash_attn use_fused_moe_token_permute_and_unpermute use_fused_ring_attention_update
    use_fused_rmsnorm use_fused_rotary_pos_emb use_fused_swiglu use_kv_cache use_mcore_models use_rotary_position_embeddings
    use_tp_pp_dp_mapping v_head_dim variable_seq_lengths vocab_extra_ids weight_decay
""".split())

RL_KEYS = frozenset("""
    actor_dynamic_max_batch_size actor_forward_micro_batch_size actor_image_embeds_dispatch_size actor_logprob_dispatch_size
    actor_max_packing_token_size actor_resource actor_rollout_dispatch_size actor_update_dispatch_size adv_dispatch_size
    adv_estimator advantage_whiten async_engine beta blocking clip_higher_enable clip_ratio clip_ratio_high clip_ratio_low
    cliprange_value colocate_actor_and_vit critic_resource critic_update_dispatch_size critic_value_dispatch_size
    data_strategy dynamic_max_batch_size dynamic_sampling_dispatch_size entropy_coeff epochs filter_groups_enable
    filter_groups_max_batches filter_groups_metric filter_groups_train_batch_size gamma guarantee_order hccl_buffersize
    init_kl_coef integrated_mode_config is_multimodal kl_ctrl_type kl_dispatch_size kl_horizon kl_penalty kl_target lam
    log_max_throughput max_packing_token_size max_parallel_calls max_prompt_length max_tool_calls max_tool_response_length
    max_total_response_length mini_batch_size multi_turn_enable n_samples_per_prompt num_cpus_for_local_task
    num_cpus_for_placement_group num_samples_per_step overlong_buffer overlong_buffer_enable overlong_buffer_penalty_factor
    partial_rollout_max_split ref_dispatch_size ref_dynamic_max_batch_size ref_forward_micro_batch_size
    ref_max_packing_token_size reference_resource require_max_age_all_finished reuse_image_embeds reward_dispatch_size
    reward_resource rollout_max_tokens rule_reward runtime_env_path share_backbone shuffle_mini_batch swanlab_exp_name
    swanlab_mode swanlab_project swanlab_save_dir token_level_loss tool_config_path tool_parser_format
    tool_response_truncate_side tp_split_expert transfer_queue_data_shard_num transfer_queue_data_shard_port_base
    update_dynamic_max_batch_size update_max_packing_token_size use_dp_batch_balance use_dynamic_bsz use_integrated_worker
    use_kl_in_reward use_remove_padding use_swanlab use_tensorboard use_wandb verifier_function verifier_parallel
    verifier_timeout verifier_weight vit_forward_micro_batch_size vit_resource wandb_exp_name wandb_project wandb_save_dir
    zmq_communication
""".split())

GENERATE_KEYS = frozenset("""
    ascend_scheduler_config_enabled data_parallel_size dtype enable_expert_parallel enable_prefix_caching enforce_eager
    eplb_token_collects eplb_token_save_path expert_map_path gpu_memory_utilization infer_expert_parallel_size
    infer_pipeline_parallel_size infer_tensor_parallel_size limit_mm_image_per_prompt limit_mm_video_per_prompt
    max_model_len max_num_batched_tokens max_num_seqs num_scheduler_steps offload_train_grad offload_train_optimizer
    offload_train_param sampling_config tokenizer_name_or_path torchair_graph trust_remote_code
""".split())

SAMPLING_KEYS = frozenset("""
    logprobs max_tokens top_p top_k min_p temperature detokenize seed
""".split())
