"""What other programs call our keys, so that an unknown one can be answered with the right one.

Names of PyTorch, Transformers, Megatron-LM, DeepSpeed, torchtitan, nanoGPT and llm.c.
"""

from collections.abc import Iterable, Mapping

from phalanx.core.errors import UsageError, unknown

TABLES: Mapping[str, str] = {
    "arch": "model",
    "architecture": "model",
    "dataset": "data",
    "optim": "recipe",
    "optimizer": "recipe",
    "parallel": "layout",
    "parallelism": "layout",
    "train": "recipe",
    "trainer": "recipe",
    "training": "recipe",
}

_WORDS: Mapping[str, str] = {
    "recipe.seq": "block_size context_length ctx max_length max_seq_len n_ctx seq_len seq_length "
    "seqlen sequence_length",
    "recipe.batch": "batch_size bs bsz gas global_batch global_batch_size gradient_accumulation "
    "gradient_accumulation_steps grad_accum train_batch_size",
    "recipe.steps": "iters lr_decay_iters max_iters max_steps num_steps total_steps train_iters",
    "recipe.stop_at": "exit_interval",
    "recipe.learning_rate": "lr max_lr peak_lr",
    "recipe.min_learning_rate": "min_lr lr_min min_lr_ratio",
    "recipe.warmup": "lr_warmup_iters warmup_iters warmup_steps num_warmup_steps",
    "recipe.decay": "lr_decay lr_decay_style lr_schedule lr_scheduler lr_scheduler_type schedule "
    "scheduler",
    "recipe.decay_from": "decay_start stable_steps",
    "recipe.weight_decay": "wd",
    "recipe.clip": "clip_grad grad_clip gradient_clipping max_grad_norm max_norm",
    "recipe.optimizer": "optim optimizer_name",
    "recipe.beta1": "adam_beta1 betas",
    "recipe.beta2": "adam_beta2",
    "recipe.eps": "adam_eps adam_epsilon epsilon",
    "recipe.moments": "optimizer_state_dtype",
    "recipe.dropout": "attention_dropout hidden_dropout",
    "recipe.balance_loss": "aux_loss moe_aux_loss_coeff router_aux_loss_coef",
    "recipe.capacity": "capacity_factor moe_expert_capacity_factor",
    "recipe.init_std": "init_method_std initializer_range",
    "recipe.seed": "random_seed",
    "recipe.checkpoint_every": "checkpoint_interval ckpt_every save_every save_interval save_steps",
    "recipe.keep": "keep_latest keep_latest_k save_total_limit",
    "recipe.evaluate_every": "eval_every eval_interval eval_steps val_every",
    "recipe.evaluate_batches": "eval_batches eval_iters val_batches",
    "data.path": "data_path dataset_path train_data_path",
    "data.token_dtype": "dtype",
    "data.validation": "split val_fraction validation_split",
    "data.document_mask": "reset_attention_mask",
    "data.separator": "eod eos eos_id eos_token_id",
    "model.layers": "depth n_layer n_layers num_hidden_layers num_layers",
    "model.hidden": "d_model dim embed_dim hidden_dim hidden_size n_embd",
    "model.heads": "n_head n_heads nheads num_attention_heads num_heads",
    "model.kv_heads": "n_kv_heads num_key_value_heads num_kv_heads num_query_groups",
    "model.ffn": "d_ff ffn_dim ffn_hidden_size intermediate_size",
    "model.vocab": "padded_vocab_size vocab_size",
    "model.tied": "tie_word_embeddings tied_embeddings",
    "model.max_positions": "max_position_embeddings",
    "model.norm_eps": "rms_norm_eps layer_norm_epsilon",
    "model.experts": "n_experts num_experts num_local_experts",
    "model.top_k": "moe_router_topk num_experts_per_tok topk",
    "layout.dp": "data_parallel data_parallel_size ddp dp_degree dp_size",
    "layout.tp": "model_parallel tensor_model_parallel_size tensor_parallel "
    "tensor_parallel_degree tensor_parallel_size tp_degree tp_size",
    "layout.pp": "pipeline_model_parallel_size pipeline_parallel pipeline_parallel_degree "
    "pipeline_parallel_size pp_degree pp_size",
    "layout.cp": "context_parallel context_parallel_degree context_parallel_size cp_size",
    "layout.ep": "ep_size expert_model_parallel_size expert_parallel expert_parallel_degree",
    "layout.zero": "fsdp fsdp2 fully_sharded_data_parallel zero_stage",
    "layout.v": "num_virtual_stages virtual_stages",
    "layout.mb": "mbs micro_batch micro_batch_size micro_bsz microbatch "
    "train_micro_batch_size_per_gpu",
    "layout.sp": "sequence_parallel",
    "layout.recompute": "ac activation_checkpoint activation_checkpointing "
    "gradient_checkpointing recompute_granularity",
    "layout.precision": "mixed_precision mp_dtype",
    "layout.compile": "torch_compile",
}
KEYS: Mapping[str, str] = {word: key for key, words in _WORDS.items() for word in words.split()}


def unknown_key(table: str, name: str, tables: Mapping[str, Iterable[str]]) -> UsageError:
    """Build the error for a key that a table does not have.

    It names the key that the field's word stands for, or the table that does have it, before the
    keys that are spelled alike.

    Args:
        table: where it stands, for example "recipe".
        name: the key.
        tables: this table, and perhaps others, with their keys.

    Example:
        >>> print(unknown_key("recipe", "lr", {"recipe": ["learning_rate"]}))
        unknown key in [recipe] 'lr'; did you mean learning_rate?
    """
    word = name.lower().replace("-", "_")
    home, _, key = KEYS.get(word, "").partition(".")
    if not home:
        home, key = next((t for t in tables if t != table and word in tables[t]), ""), word
    what = "layout key" if table == "layout" else f"key in [{table}]"
    if not home:
        return unknown(what, name, tables[table])
    meant = key if home == table else f"{home}.{key}"
    return UsageError(f"unknown {what} {name!r}; did you mean {meant}?")


def unknown_table(name: str, known: Iterable[str]) -> UsageError:
    """Build the error for a table that a run file does not have.

    Args:
        name: of the table.
        known: the tables that there are.
    """
    meant = TABLES.get(name.lower())
    if meant is None:
        return unknown("table", name, known)
    return UsageError(f"unknown table {name!r}; did you mean {meant}?")
