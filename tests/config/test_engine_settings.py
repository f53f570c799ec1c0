"""Engines with expert parallelism, attention groups and speculative decoding: what goes with what."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.config.rollout import SETTINGS_OF_ARGUMENTS

ENGINE = "rollout.engine"
NGRAM = f"{ENGINE}.speculative.algorithm=NGRAM"
DRAFTED = [
    f"{ENGINE}.speculative.algorithm=EAGLE3",
    f"{ENGINE}.speculative.draft_model_path=/draft",
    "weight_sync.method=tensor",
]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [f"{ENGINE}.tensor_parallel_size=4", f"{ENGINE}.expert_parallel_size=3"],
            "expert_parallel_size=3 must divide",
        ),
        ([f"{ENGINE}.attention_data_parallel_size=2"], "attention_data_parallel_size=2 must divide"),
        (
            [f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.expert_parallel_size=2", f"{ENGINE}.device=cpu"],
            "needs CUDA",
        ),
        (
            [f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.expert_parallel_size=2", "weight_sync.verify=true"],
            "weight_sync.verify=true",
        ),
        (
            [f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.attention_data_parallel_size=2", "weight_sync.verify=true"],
            "weight_sync.verify=true",
        ),
        ([f"{ENGINE}.extra_args=[--ep-size,2]"], "expert_parallel_size here"),
        ([f"{ENGINE}.extra_args=[--attn-dp-size=2]"], "attention_data_parallel_size here"),
        ([f"{ENGINE}.extra_args=[--dp-size,2]"], "rollout.engine.count here"),
        ([f"{ENGINE}.extra_args=[--speculative-algorithm,NGRAM]"], "speculative.algorithm here"),
        ([f"{ENGINE}.extra_args=[--speculative-accept-threshold-single,0.5]"], "would not have sampled as often"),
        ([f"{ENGINE}.extra_args=[--api-key,mine]"], "--api-key does not go with the key that every engine gets"),
        ([f"{ENGINE}.extra_args=[--config=engine.yaml]"], "give the file's lines as arguments"),
        ([f"{ENGINE}.extra_args=[--enable-lora]"], "adapters.max_rank here"),
        ([f"{ENGINE}.extra_args=[--lora-backend,triton]"], "adapters.backend here"),
        ([f"{ENGINE}.adapters.per_batch=2"], "per_batch=2: nothing reads it"),
        ([f"{ENGINE}.adapters.max_rank=8", f"{ENGINE}.adapters.targets=[experts]"], "one or more of attention, mlp"),
        (
            [f"{ENGINE}.adapters.max_rank=8", f"{ENGINE}.adapters.backend=csgmv", f"{ENGINE}.device=cpu"],
            "backend=csgmv needs CUDA",
        ),
        ([f"{ENGINE}.adapters.max_rank=8", f"{ENGINE}.backend=transformers"], "loads no adapters"),
        (
            [
                f"{ENGINE}.adapters.max_rank=8",
                f"{ENGINE}.tensor_parallel_size=2",
                f"{ENGINE}.attention_data_parallel_size=2",
            ],
            "adapters.max_rank=8 does not go with",
        ),
        ([f"{ENGINE}.speculative.num_steps=3"], "num_steps=3 needs"),
        ([f"{ENGINE}.speculative.algorithm=STANDALONE"], "needs .*draft_model_path"),
        ([NGRAM, f"{ENGINE}.speculative.draft_model_path=/draft"], "NGRAM has no draft model"),
        ([NGRAM, f"{ENGINE}.device=cpu"], "needs CUDA"),
        ([NGRAM, f"{ENGINE}.random_seed=1"], "random_seed"),
        (
            [NGRAM, f"{ENGINE}.tensor_parallel_size=2", f"{ENGINE}.attention_data_parallel_size=2"],
            "attention_data_parallel_size=2",
        ),
        ([NGRAM, "rollout.train.top_p=0.9"], "rollout.train.top_p=1"),
        ([NGRAM, "rollout.train.top_k=20"], "rollout.train.top_k=-1"),
        ([NGRAM, "rollout.train.min_p=0.1"], "rollout.train.min_p=0"),
        ([NGRAM, "rollout.val.min_p=0.1"], "rollout.val.min_p=0"),
        ([NGRAM, "learner.routing_replay=rollout"], "routing_replay=rollout"),
        ([*DRAFTED[:2], "weight_sync.method=disk"], "into the draft model too"),
        ([*DRAFTED, "weight_sync.verify=true"], "with a draft model needs weight_sync.verify=false"),
    ],
)
def test_what_does_not_go_together_is_said_with_its_key(overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(None, overrides)


def test_what_goes_together_loads():
    load_config(None, [NGRAM, f"{ENGINE}.device=cuda"])
    load_config(None, [*DRAFTED, f"{ENGINE}.speculative.num_steps=3", "rollout.train.temperature=0.8"])


@pytest.mark.parametrize(
    ("overrides", "synced"),
    [
        ([], True),
        (["learner.mtp.train=false"], False),
        ([f"{ENGINE}.speculative.draft_model_path=/draft"], False),
        ([f"{ENGINE}.quantization=fp8"], False),
    ],
)
def test_a_draft_that_the_learner_trains_is_synced(overrides: list[str], synced: bool) -> None:
    own = [
        "model.path=/model",
        f"{ENGINE}.speculative.algorithm=EAGLE",
        f"{ENGINE}.speculative.draft_model_path=/model",
        f"{ENGINE}.device=cuda",
        "learner.mtp.train=true",
    ]
    assert load_config(None, [*own, *overrides]).trains_draft is synced
    load_config(
        None,
        [
            f"{ENGINE}.tensor_parallel_size=8",
            f"{ENGINE}.expert_parallel_size=4",
            f"{ENGINE}.attention_data_parallel_size=8",
        ],
    )


# --- what the installed SGLang does, on which the rules rest ----------------------------------------------------------


def sglang_source(*parts: str) -> str:
    found = importlib.util.find_spec("sglang")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]).joinpath("srt", *parts).read_text(encoding="utf-8")


def function(source: str, name: str) -> str:
    (found,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
    )
    return ast.unparse(found)


def test_log_probs_of_accepted_tokens_are_of_the_whole_distribution_at_the_temperature():
    """Why filters have to be off: the sampler takes them into account, the log-probs do not."""
    log_probs = function(sglang_source("layers", "logprob_processor.py"), "compute_spec_logprobs")
    assert "gathered_logits / temperatures" in log_probs and "log_softmax" in log_probs
    assert not re.search("top_p|top_k|min_p", log_probs)
    sampler = function(sglang_source("speculative", "eagle_utils.py"), "eagle_sample")
    assert "top_p_renorm_prob" in sampler and "top_k_renorm_prob" in sampler and "min_p" not in sampler
    assert "eagle_sample(" in sglang_source("speculative", "ngram_worker.py")


def test_guesses_are_checked_greedily_on_a_cpu():
    """Why speculation needs CUDA."""
    greedy = function(sglang_source("speculative", "eagle_utils.py"), "_verify_uses_greedy")
    assert "or is_cpu" in greedy


def test_thresholds_of_acceptance_leave_the_distribution_alone_by_default():
    fields = sglang_source("arg_groups", "fields", "spec.py")
    for name in ("single", "acc"):
        assert re.search(rf"speculative_accept_threshold_{name}: A\[[^\]]*\] = 1\.0", fields)


def test_new_weights_reach_the_draft_model_unless_the_policy_is_named_and_always_from_files():
    requests = sglang_source("managers", "io_struct.py")
    assert requests.count('selector: Literal["target", "draft", "all"] = "all"') >= 3
    updater = sglang_source("managers", "scheduler_components", "weight_updater.py")
    assert "self._select_runners():" in function(updater, "update_weights_from_disk")
    for name in ("update_weights_from_tensor", "update_weights_from_distributed", "begin_weight_update"):
        assert "_select_runners(recv_req.selector)" in function(updater, name)


def test_only_whole_replicas_refuse_new_weights():
    """dp_size counts replicas alone: attention groups are attn_dp_size."""
    control = sglang_source("managers", "tokenizer_control_mixin.py")
    for name in ("update_weights_from_tensor", "update_weights_from_distributed", "init_weights_update_group"):
        checks = re.findall(r"assert get_parallel\(\)\.(\w+) == 1", function(control, name))
        assert checks == ["dp_size"]
    layout = sglang_source("arg_groups", "fields", "parallel.py")
    assert "--attention-data-parallel-size" in layout and "The number of data-parallel replicas of the model." in layout


def test_adapters_are_for_the_matrices_that_the_refusals_leave():
    """Why gated delta nets and groups of attention are refused, and why what is unloaded has to be forgotten."""
    choices = re.search(r"SUPPORTED_LORA_TARGET_MODULES = \[(.*?)\]", sglang_source("utils", "common.py"), re.S)
    assert choices is not None and "in_proj" not in choices[1]
    for name in (
        "q_proj",
        "k_proj",
        "v_proj",
        "qkv_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "gate_up_proj",
        "down_proj",
    ):
        assert f'"{name}"' in choices[1]
    manager = sglang_source("lora", "lora_manager.py")
    assert "not self.attn_dp_enabled or lora_ref.pinned" in function(manager, "validate_new_adapter")
    assert "lora_ref_cache" in function(sglang_source("managers", "tokenizer_manager.py"), "_resolve_lora_path")
    # Factors meet the model only when a batch needs them.
    assert "load_lora_weight_to_buffer" not in function(manager, "_load_lora_adapter")


def test_the_arguments_are_sglangs():
    fields = "".join(
        sglang_source("arg_groups", "fields", name) for name in ("spec.py", "parallel.py", "exec_.py", "lora.py")
    )
    own = [*SETTINGS_OF_ARGUMENTS, "--enable-draft-weights-cpu-backup", "--speculative-draft-load-format"]
    for argument in own:
        name = argument.removeprefix("--").replace("-", "_")
        assert f"\n    {name}: A[" in fields or f'"{argument}"' in fields, argument
