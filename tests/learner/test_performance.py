"""Options for speed and memory: refusals by model and machine, and what Megatron-Core really takes."""

from __future__ import annotations

import importlib.util
import inspect
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from conversion.model.layout import ParallelLayout
from megatron_retool.config import Config, ConfigError, CriticConfig, Fp8Config, LearnerConfig, OptimizerConfig
from megatron_retool.learner import cpu
from megatron_retool.learner.performance import (
    check_performance,
    data_parallel_options,
    layer_options,
    optimizer_state_options,
    pipeline_options,
)
from megatron_retool.learner.precision import RECOMPUTE_MODULES, Acceleration, acceleration_for, optimizer_options
from megatron_retool.planning.models import MODELS, preset
from tests.conversion.model.test_layout import DENSE, EXPERTS, LATENT, LINEAR, SINKS, SPARSE
from tests.learner.test_precision import BARE_H200, CPU, H200

# Whoever has Transformer Engine and no Apex.
ENGINE = replace(H200, apex=False, fused_weight_gradient=False)
FLEX = {"moe_token_dispatcher_type": "flex"}
AWARE = {"use_precision_aware_optimizer": True}
BEST = replace(EXPERTS, router_groups=(2, 1), router_group_score="best")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_in_transformer_engines_layers(name: str) -> None:
    model = preset(name)
    check({}, model=model)
    assert ENGINE.packs_attention(model) is model.needs_packed_attention()
    assert ENGINE.local().packs_attention(model)


def test_exact_numbers_use_no_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Acceleration, "detect", lambda: ENGINE)
    assert acceleration_for(LearnerConfig()) == ENGINE
    assert acceleration_for(LearnerConfig(match_engine="exact")) == ENGINE.local()


def check(
    settings: dict[str, Any], optimizer: dict[str, Any] | None = None, *, model: Any = EXPERTS, machine: Any = ENGINE
) -> None:
    learner = LearnerConfig(world_size=2, **settings)
    layout = ParallelLayout.of_ranks(2, expert=learner.expert_model_parallel_size)
    check_performance(learner, OptimizerConfig(**(optimizer or {})), model, layout, machine)


@pytest.mark.parametrize(
    ("settings", "optimizer", "given", "message"),
    [
        ({"moe_permute_fusion": True}, {}, {"model": DENSE}, "moe_permute_fusion needs a mixture-of-experts model"),
        ({"moe_permute_fusion": True}, {}, {"machine": BARE_H200}, "needs CUDA and Transformer Engine: set learner"),
        ({"share_prefixes": True}, {}, {"model": SINKS, "machine": CPU}, "does not go with .* attention sinks"),
        ({"share_prefixes": True}, {}, {"model": LINEAR, "machine": CPU}, "not go with this model's layers without"),
        ({"share_prefixes": True}, {}, {"model": SPARSE, "machine": CPU}, "does not go with this model's sparse atte"),
        ({"moe_router_fusion": True}, {}, {"machine": replace(ENGINE, transformer_engine="2.5.1")}, "2.6 or later"),
        ({"moe_router_fusion": True}, {}, {"model": BEST}, "whose groups of experts are chosen by their best one"),
        (FLEX, {}, {"machine": CPU}, "flex needs CUDA and Transformer Engine: set learner.*=alltoall"),
        (FLEX, {}, {}, "needs learner.expert_model_parallel_size above 1"),
        (FLEX | {"expert_model_parallel_size": 2}, {}, {}, "deep_ep .*not installed"),
        ({"cpu_offloading_num_layers": 1}, {}, {"machine": CPU}, "needs CUDA and Transformer Engine: set it to 0"),
        ({"cpu_offloading_num_layers": 99}, {}, {}, "less than the model's 8 layers"),
        ({}, AWARE, {"machine": CPU}, "use_precision_aware_optimizer=true needs CUDA and Transformer Engine"),
    ],
)  # fmt: skip
def test_refused_by_model_or_machine(
    settings: dict[str, Any], optimizer: dict[str, Any], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(settings, optimizer, **given)


KEPT = Fp8Config(recipe="tensorwise", parameters=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fp8": Fp8Config(parameters=True)}, "learner.fp8.parameters=true needs learner.fp8.recipe"),
        (
            {"fp8": Fp8Config(recipe="mxfp8", parameters=True), "overlap_grad_reduce": True}
            | {"overlap_param_gather": True},
            "learner.overlap_param_gather=true does not go with learner.fp8.parameters=true beside .*mxfp8",
        ),
        ({"fp8": KEPT, "use_distributed_optimizer": False}, "needs learner.use_distributed_optimizer=true"),
        ({"fp8": KEPT, "optimizer": OptimizerConfig(cpu_offload=True)}, "learner.optimizer.cpu_offload=true does not"),
        (
            {"fp8": KEPT, "critic": CriticConfig(optimizer=OptimizerConfig(**AWARE))},
            "learner.critic.optimizer.use_precision_aware_optimizer=true does not go with learner.fp8.parameters=true",
        ),
    ],
)
def test_weights_in_fp8_need_other_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LearnerConfig(**settings).check()
    for recipe in ("tensorwise", "blockwise", "mxfp8", "nvfp4"):
        LearnerConfig(fp8=Fp8Config(recipe=recipe, parameters=True)).check()


def test_accepted_where_everything_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "deep_ep")
    check(FLEX | {"expert_model_parallel_size": 2, "moe_permute_fusion": True, "moe_router_fusion": True}, AWARE)
    check({"cpu_offloading_num_layers": 7})
    check({}, model=DENSE, machine=CPU)
    check({}, model=LATENT, machine=CPU)
    check({}, model=LINEAR, machine=CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlap_param_gather": True, "use_distributed_optimizer": False}, "use_distributed_optimizer=true"),
        ({"overlap_param_gather": True}, "overlap_param_gather=true needs learner.overlap_grad_reduce=true"),
        ({"gradient_bucket_size": 10}, "gradient_bucket_size belongs to learner.overlap_grad_reduce=true"),
        ({"overlap_p2p_comm": True}, "overlap_p2p_comm=true needs learner.virtual_pipeline_model_parallel_size"),
        (
            {"world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "pipeline_model_parallel_size=2 needs learner.overlap_p2p_comm=true",
        ),
        ({"dynamic_context_parallel": True}, "dynamic_context_parallel=true needs learner.context_parallel_size > 1"),
        ({"moe_router_fusion": True, "routing_replay": "rollout"}, "does not go with learner.moe_router_fusion"),
        (FLEX | {"dtype": "float32"}, "flex needs learner.dtype=bfloat16, not float32"),
        (
            {"cpu_offloading_num_layers": 1, "world_size": 2, "pipeline_model_parallel_size": 2},
            "needs learner.pipeline_model_parallel_size=1",
        ),
        ({"optimizer": OptimizerConfig(exp_avg_dtype="bfloat16")}, "exp_avg_dtype=bfloat16 needs .*aware_optimizer"),
        ({"optimizer": OptimizerConfig(cpu_offload=True, **AWARE)}, "set learner.optimizer.cpu_offload=false"),
        ({"optimizer": OptimizerConfig(**AWARE), "dtype": "float32"}, "float32 weights have no main parameters"),
        (
            {"optimizer": OptimizerConfig(**AWARE), "use_distributed_optimizer": False},
            "aware_optimizer=true needs learner.use_distributed_optimizer=true",
        ),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config(learner=LearnerConfig(**settings)).learner.check()


def test_megatron_takes_every_option() -> None:
    cpu.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    overlapping = LearnerConfig(
        world_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        overlap_p2p_comm=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        gradient_bucket_size=1000,
        expert_model_parallel_size=2,
        moe_permute_fusion=False,  # without Transformer Engine Megatron refuses it
        **FLEX,
    )
    ddp = DistributedDataParallelConfig(**data_parallel_options(overlapping))
    assert (ddp.overlap_grad_reduce, ddp.overlap_param_gather, ddp.bucket_size) == (True, True, 1000)
    model = {"num_layers": 8, "hidden_size": 16, "num_attention_heads": 2, "variable_seq_lengths": True}
    parallel = {"pipeline_model_parallel_size": 4, "pipeline_dtype": torch.bfloat16, "expert_model_parallel_size": 2}
    taken = TransformerConfig(
        num_moe_experts=4,
        **model,
        **parallel,
        **layer_options(overlapping, ENGINE),
        **pipeline_options(overlapping, CPU),
    )
    assert (taken.overlap_p2p_comm, taken.batch_p2p_comm) == (True, False)
    assert (taken.moe_token_dispatcher_type, taken.moe_flex_dispatcher_backend) == ("flex", "deepep")

    offloading = LearnerConfig(cpu_offloading_num_layers=3, moe_permute_fusion=False)
    taken = TransformerConfig(**model, **layer_options(offloading, ENGINE), **pipeline_options(offloading, CPU))
    assert taken.cpu_offloading and taken.cpu_offloading_num_layers == 3
    assert taken.batch_p2p_comm and not taken.overlap_p2p_comm
    with pytest.raises(ValueError, match="activation recomputation"):  # as LearnerConfig.check says
        TransformerConfig(**model, **layer_options(offloading, ENGINE), recompute_granularity="selective")
    # These ask for Transformer Engine's kernels where they are constructed.
    fused = LearnerConfig(moe_permute_fusion=True, moe_router_fusion=True)
    assert layer_options(fused, ENGINE).keys() <= TransformerConfig.__dataclass_fields__.keys()


def test_tokens_are_sorted_by_transformer_engine_where_it_is_there() -> None:
    chosen = [(None, ENGINE), (None, CPU), (None, BARE_H200), (False, ENGINE), (True, ENGINE)]
    taken = [layer_options(LearnerConfig(moe_permute_fusion=fused), machine) for fused, machine in chosen]
    assert [options["moe_permute_fusion"] for options in taken] == [True, False, False, False, True]
    old = replace(ENGINE, transformer_engine="2.0.0")
    assert not layer_options(LearnerConfig(), old)["moe_permute_fusion"]


def test_megatron_takes_the_dtypes_of_the_optimizers_state() -> None:
    cpu.install()
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

    settings = OptimizerConfig(exp_avg_dtype="bfloat16", exp_avg_sq_dtype="float16", **AWARE)
    options = optimizer_options(LearnerConfig(), settings) | optimizer_state_options(settings)
    # Constructed it would ask for Transformer Engine's Adam.
    assert options.keys() <= MegatronOptimizerConfig.__dataclass_fields__.keys()
    assert (options["exp_avg_dtype"], options["exp_avg_sq_dtype"]) == (torch.bfloat16, torch.float16)
    assert options["store_param_remainders"] and options["main_params_dtype"] == torch.float32
    halved = replace(settings, main_params_dtype="float16")
    assert not optimizer_state_options(halved)["store_param_remainders"]
    assert optimizer_state_options(OptimizerConfig()) == {}


def test_weight_gradients_are_fused_by_transformer_engine_or_apex() -> None:
    fused = {
        name: layer_options(LearnerConfig(), machine)["gradient_accumulation_fusion"]
        for name, machine in {"engine": ENGINE, "apex": replace(BARE_H200, fused_weight_gradient=True),
                              "bare": BARE_H200, "cpu": CPU}.items()
    }  # fmt: skip
    assert fused == {"engine": True, "apex": True, "bare": False, "cpu": False}
    off = LearnerConfig(gradient_accumulation_fusion=False)
    assert not layer_options(off, H200)["gradient_accumulation_fusion"]


def test_the_output_layer_beside_fused_layers_is_built_without_apex() -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_retool.learner import parallel
    from megatron_retool.learner.model import unfused_output_layer

    parallel.initialize(ParallelLayout.of_ranks(1), torch.device("cpu"), 0)
    fused = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, gradient_accumulation_fusion=True)

    def output_layer() -> Any:
        return ColumnParallelLinear(16, 32, config=fused, init_method=torch.nn.init.zeros_, bias=False)

    with unfused_output_layer():
        assert output_layer().weight.shape == (32, 16)
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda"):
        output_layer()


def test_every_module_that_megatron_can_recompute_is_offered() -> None:
    """But for multi-latent attention and gated delta nets, which here are modules of their own, and shared experts."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    source = inspect.getsource(TransformerConfig.__post_init__)
    allowed = re.search(r'granularity == "selective":.*?allowed_modules = \{(.*?)\}', source, re.DOTALL)
    assert allowed is not None
    not_offered = {"mla_up_proj", "gdn_norm_out", "shared_experts"}
    assert set(re.findall(r'"(\w+)"', allowed[1])) - not_offered == set(RECOMPUTE_MODULES)
