"""Predicted times against published runs, with the errors as they are, and against the laws of scaling."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from conversion.model.layout import ParallelLayout
from megatron_retool.config import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EngineConfig,
    Fp8Config,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    RecomputeConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    SamplingConfig,
    WeightSyncConfig,
    load_config,
)
from megatron_retool.planning.engine_model import GPU_PROFILE, EngineModel
from megatron_retool.planning.hardware import ACCELERATORS, parse_machines
from megatron_retool.planning.learner_time import Assumptions, learner_time
from megatron_retool.planning.models import demo_architecture, preset, resolve_architecture
from megatron_retool.planning.simulate import RolloutSimulation, mean_result
from megatron_retool.planning.timing import StepTime, predict_run, predict_step
from megatron_retool.planning.workload import Workload, workload_of
from run_files.phases import Phase
from tests.planning import published_run as published

RECIPE = "configs/retool_qwen2.5_32b_8xh200.yaml"


# --- the published run of the recipe --------------------------------------------------------------------------------


def test_the_published_batch_is_8192_responses() -> None:
    first = published.STEPS[1]
    assert first.total_tokens is not None and first.step is not None
    assert published.workload(first).trained_tokens == pytest.approx(first.total_tokens, rel=2e-4)
    assert first.total_tokens / (published.GPUS * first.step) == pytest.approx(641, abs=0.5)
    tenth = published.STEPS[10]
    assert published.workload(tenth).trained_tokens == pytest.approx(tenth.total_tokens, rel=2e-3)


def test_update_and_log_probs_of_the_published_run() -> None:
    """At the published MFU. Update: -3.6 % and -2.2 %. Log-probs as a third of it: +10 % and +15 %."""
    for number, update, log_probs in ((1, -0.036, 0.099), (2, -0.022, 0.151)):
        step = published.STEPS[number]
        assert step.update is not None and step.log_probs is not None
        assert published.predicted_update(step) / step.update - 1 == pytest.approx(update, abs=0.005)
        assert published.predicted_log_probs(step) / step.log_probs - 1 == pytest.approx(log_probs, abs=0.005)


def test_generation_of_the_published_run() -> None:
    """One constant was fitted to step 1; step 2 and the slowest responses of steps 9 and 10 were not looked at."""
    errors = {}
    for number, step in published.STEPS.items():
        seconds = step.generation or step.slowest_response
        assert seconds is not None
        errors[number] = published.predicted_generation(step).seconds / seconds - 1
    assert errors[1] == pytest.approx(0.0, abs=0.01)
    assert errors[2] == pytest.approx(0.018, abs=0.01)
    assert errors[9] == pytest.approx(-0.016, abs=0.01)
    assert errors[10] == pytest.approx(-0.024, abs=0.01)


def test_whole_steps_of_the_published_run() -> None:
    """-0.3 %, +1.6 %, +0.5 % and -0.3 %: the errors of the phases partly cancel."""
    for number, error in ((1, -0.003), (2, 0.016), (9, 0.005), (10, -0.003)):
        step = published.STEPS[number]
        predicted = published.predicted_generation(step).seconds
        predicted += published.predicted_update(step) + published.predicted_log_probs(step)
        assert step.step is not None
        assert predicted / step.step - 1 == pytest.approx(error, abs=0.01)


def test_a_tuned_engine_would_have_generated_in_half_the_time() -> None:
    """What is lost to 31 ms a decode step and to prefixes that are read again: 48 %."""
    step = published.STEPS[1]
    tuned = published.predicted_generation(step, GPU_PROFILE).seconds
    assert step.generation is not None
    assert tuned / step.generation == pytest.approx(0.52, abs=0.03)


# --- other published systems ----------------------------------------------------------------------------------------


def nemo_rl(model: str, gpus: int, length: float, limit: int, engine_tp: int, tp: int, pp: int, ep: int) -> StepTime:
    """NVIDIA NeMo RL 0.4, performance summary: GRPO on H100, 64 prompts x 32 responses, bf16, Megatron-Core learner.

    Prompts of 150 tokens and the share at the limit are assumptions.
    """
    learner = LearnerConfig(
        world_size=gpus, tensor_model_parallel_size=tp, sequence_parallel=tp > 1, pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=1 if ep > 1 else None, mini_batch_size=512,
        max_tokens_per_micro_batch=8192,
    )  # fmt: skip
    engine = EngineConfig(count=gpus // engine_tp, tensor_parallel_size=engine_tp, mem_fraction_static=0.6)
    config = Config(
        learner=learner,
        data=DataConfig(train_batch_size=64, max_response_length=limit),
        rollout=RolloutConfig(train=SamplingConfig(n=32), engine=engine),
        cluster=ClusterConfig(placement="colocated"),
        algorithm=AlgorithmConfig(kl_in_loss=0.01),
    )
    clip = 0.45 if length > 0.7 * limit else 0.01
    workload = workload_of(config, response_mean=length - 150, clip_ratio=clip, prompt_tokens=150, tool_calls=0)
    architecture = preset(model)
    layout = learner.layout(architecture)
    return predict_step(config, architecture, layout, parse_machines(f"H100x{gpus}"), workload)


@pytest.mark.parametrize(
    ("arguments", "seconds", "error"),
    [
        (("qwen3-32b", 32, 3206, 4096, 4, 4, 4, 1), 393, -0.29),
        (("qwen3-30b-a3b", 32, 3154, 4096, 4, 2, 1, 8), 225, -0.41),
        (("llama3.1-8b", 16, 1060, 4096, 1, 1, 2, 1), 97.7, -0.35),
    ],
)
def test_steps_of_another_system_take_longer_than_predicted(
    arguments: tuple[Any, ...], seconds: float, error: float
) -> None:
    """Nothing was fitted to them: the model is of a well-tuned system, and knows no overhead between the phases."""
    assert nemo_rl(*arguments).total / seconds - 1 == pytest.approx(error, abs=0.03)


def test_the_demo_takes_about_as_long_as_predicted() -> None:
    """A run of the demo on two idle cores, medians over 80 steps."""
    measured = {"gen": 2.61, "old_log_prob": 0.180, "update_actor": 0.520, "step": 3.40}
    config = load_config(
        "configs/demo_cpu.yaml",
        ["learner.world_size=2", "data.train_batch_size=16", "rollout.train.n=8", "learner.fuse_old_log_probs=auto"],
    )
    workload = workload_of(
        config, response_mean=71.2, clip_ratio=0.0156, prompt_tokens=60.2, tool_calls=1.05, tool_seconds=0.094,
        kept_groups=17 / 29,
    )  # fmt: skip
    # The seconds measured for a call contain its wait for a worker.
    workload = replace(workload, sandbox_workers=workload.responses)
    architecture = demo_architecture(config.demo)
    layout = config.learner.layout(architecture)
    step = predict_step(config, architecture, layout, parse_machines("CPUx2"), workload)
    errors = {name: seconds / measured[name] - 1 for name, seconds in (step.phases() | {"step": step.total}).items()
              if name in measured}  # fmt: skip
    assert errors == pytest.approx({"gen": 0.07, "old_log_prob": -0.02, "update_actor": 0.02, "step": 0.03}, abs=0.06)


# --- laws -----------------------------------------------------------------------------------------------------------


def times(training: bool = True, gpus: int = 32, **changes: Any) -> Any:
    architecture = preset(changes.pop("model", "qwen2.5-32b"))
    learner = replace(
        LearnerConfig(
            world_size=gpus, tensor_model_parallel_size=4, sequence_parallel=True, max_tokens_per_micro_batch=36864
        ),
        **changes,
    )
    workload = workload_of(load_config(RECIPE))
    layout: ParallelLayout = learner.layout(architecture)
    machines = parse_machines(f"H200x{gpus}")
    return learner_time(architecture, learner, layout, machines, workload, Assumptions(), training)


def test_overlap_hides_the_exchange_of_gradients_behind_one_micro_batch() -> None:
    plain = times()
    half, both = times(overlap_grad_reduce=True), times(overlap_grad_reduce=True, overlap_param_gather=True)
    assert plain.gradient_exchange > half.gradient_exchange > both.gradient_exchange >= 0
    assert half.total == plain.total - plain.gradient_exchange + half.gradient_exchange
    tiny = times(overlap_grad_reduce=True, max_tokens_per_micro_batch=2048)  # one micro-batch hides little
    assert half.gradient_exchange < tiny.gradient_exchange < plain.gradient_exchange


def test_an_update_is_three_passes_and_recomputation_a_fourth() -> None:
    update = times()
    assert update.compute == pytest.approx(3 * times(training=False).compute)
    assert update.recompute == 0
    full = times(recompute=RecomputeConfig("full", "uniform", 1))
    assert full.recompute == pytest.approx(full.compute / 3)
    assert full.tensor_exchange == pytest.approx(update.tensor_exchange * 4 / 3)
    half = times(recompute=RecomputeConfig("full", "block", 32))
    assert half.recompute == pytest.approx(full.recompute / 2)
    chunks = {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
    # So many layers of each of the two chunks of a stage of 16; a stage has no more than it has.
    assert times(recompute=RecomputeConfig("full", "block", 4), **chunks).recompute == pytest.approx(half.recompute)
    assert times(recompute=RecomputeConfig("full", "block", 32), **chunks).recompute == pytest.approx(full.recompute)
    mlp = times(recompute=RecomputeConfig("selective", modules=["mlp"]))
    assert 0.5 * full.recompute < mlp.recompute < full.recompute
    assert times(fp8=Fp8Config(recipe="blockwise")).compute == pytest.approx(update.compute / 1.35)


def test_adapters_save_a_third_of_an_update_and_nearly_all_of_the_exchange() -> None:
    whole, adapters = times(), times(lora=LoraConfig(rank=32))
    assert 2 / 3 < adapters.compute / whole.compute < 0.69
    assert adapters.gradient_exchange + adapters.optimizer < 0.02 * (whole.gradient_exchange + whole.optimizer)
    assert times(lora=LoraConfig(rank=256)).compute > adapters.compute
    reading, plain = times(training=False, lora=LoraConfig(rank=32)), times(training=False)
    assert 1 < reading.compute / plain.compute < 1.02


def test_twice_the_gpus_halve_the_arithmetic_and_not_the_imbalance() -> None:
    few, many = times(gpus=32), times(gpus=64)
    assert many.compute == pytest.approx(few.compute / 2)
    assert many.imbalance >= few.imbalance / 2
    assert many.total > few.total / 2
    # A mini-batch of 64 responses on 64 ranks waits for its longest response.
    assert times(gpus=256).imbalance > times(gpus=256).compute


def test_every_kind_of_parallelism_has_its_price() -> None:
    plain = times(tensor_model_parallel_size=1, sequence_parallel=False)
    assert plain.tensor_exchange == plain.context_exchange == plain.expert_exchange == plain.bubble == 0
    assert times().tensor_exchange > 0
    assert times(context_parallel_size=2).context_exchange > 0
    # A gated delta net exchanges what it computes a state of, which is more than keys and values, and no rank can hide.
    cut: dict[str, Any] = {"tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 2}
    linear, attention = times(model="qwen3-next-80b-a3b", **cut), times(model="qwen3-30b-a3b", **cut)
    assert linear.context_exchange > attention.context_exchange > 0
    # Sequences that one rank holds are exchanged with no other.
    cut["dynamic_context_parallel"] = True
    shorter, short = (times(**cut, max_tokens_per_micro_batch=tokens) for tokens in (18432, 131072))
    assert times(**{**cut, "dynamic_context_parallel": False}).context_exchange > shorter.context_exchange
    assert shorter.context_exchange > short.context_exchange == 0
    assert times(model="qwen3-next-80b-a3b", **cut).context_exchange < linear.context_exchange
    deep = times(pipeline_model_parallel_size=4)
    assert deep.bubble > times(pipeline_model_parallel_size=2).bubble > 0
    # TP over two nodes goes through the network.
    architecture, machines = preset("qwen2.5-72b"), parse_machines("H200x32")
    wide = machines.bandwidth_between(16)
    assert wide < machines.bandwidth_between(8)
    assert architecture.num_attention_heads % 16 == 0
    experts = times(model="qwen3-30b-a3b", expert_model_parallel_size=8, expert_tensor_parallel_size=1)
    across = times(model="qwen3-30b-a3b", expert_model_parallel_size=32, expert_tensor_parallel_size=1)
    assert across.expert_exchange > 2 * experts.expert_exchange > 0
    assert times(optimizer=OptimizerConfig(cpu_offload=True)).optimizer > times().optimizer


def recipe(*overrides: str) -> tuple[Config, StepTime, Workload]:
    config = load_config(RECIPE, overrides)
    architecture = preset("qwen2.5-32b")
    workload = workload_of(config)
    layout = config.learner.layout(architecture)
    return config, predict_step(config, architecture, layout, parse_machines("H200x8"), workload), workload


def test_phases_add_up_and_follow_the_algorithm() -> None:
    _, step, workload = recipe()
    assert sum(step.phases().values()) == pytest.approx(step.total)
    assert set(step.phases()) == {
        Phase.GENERATION, Phase.OLD_LOG_PROB, Phase.UPDATE_ACTOR, Phase.WEIGHT_SYNC, Phase.PHASE_SWITCH
    }  # fmt: skip
    # As a run times it: the way to host memory is part of the weight sync.
    assert step.phases()[Phase.WEIGHT_SYNC] == pytest.approx(step.weight_sync + step.phase_switch / 2)
    assert step.tokens_per_second_per_gpu == pytest.approx(workload.trained_tokens / step.total / 8)
    assert 0.25 < step.mfu < 0.5
    whole = recipe("learner.fuse_old_log_probs=never")[1].log_probs.total
    assert step.log_probs.total == pytest.approx(7 / 8 * whole)
    assert recipe("learner.mini_batch_size=512")[1].phases()[Phase.OLD_LOG_PROB] == 0.0
    _, with_reference, _ = recipe("algorithm.kl_in_loss=0.001")
    assert with_reference.phases()["ref"] == pytest.approx(whole)
    _, with_critic, _ = recipe("algorithm.advantage=gae", "algorithm.dynamic_sampling.enable=false")
    assert with_critic.phases()["update_critic"] > step.update.total
    _, bypass, _ = recipe(
        "algorithm.rollout_correction.bypass_old_log_probs=true", "algorithm.rollout_correction.mode=none"
    )
    assert bypass.log_probs.total == 0
    assert RolloutCorrectionConfig().bypass_old_log_probs is False


def test_an_asynchronous_run_takes_the_longer_of_the_two() -> None:
    overrides = ["cluster.placement=disaggregated", "rollout.engine.count=1", "learner.world_size=8", "cluster.nodes=2"]
    _, one_after_the_other, _ = recipe(*overrides)
    _, overlapped, _ = recipe(*overrides, "rollout.staleness=1")
    assert not one_after_the_other.overlapped and overlapped.overlapped
    assert one_after_the_other.phase_switch == 0
    longer = max(overlapped.generation.seconds, overlapped.training)
    assert overlapped.total == pytest.approx(longer + overlapped.weight_sync)


def test_engines_that_never_stop_need_no_tail() -> None:
    """32B on 2 x 8 H100: asynchronous with GPUs divided against waiting on all of them."""
    shared = ["cluster.nodes=2", "learner.world_size=16", "rollout.engine.count=4", "rollout.partial.enable=false"]
    divided = ["cluster.nodes=2", "cluster.placement=disaggregated", "learner.world_size=8", "rollout.engine.count=2"]
    architecture, steps = preset("qwen2.5-32b"), []
    streams = [*divided, "rollout.partial.enable=false", "trainer.mode=async"]
    for overrides in (shared, streams, [*streams, "trainer.max_age=2"]):
        config = load_config(RECIPE, overrides)
        layout, machines = config.learner.layout(architecture), parse_machines("H100x16")
        steps.append(predict_step(config, architecture, layout, machines, workload_of(config)))
    waiting, bounded, streaming = steps
    assert streaming.overlapped and not waiting.overlapped
    assert waiting.total > 1.8 * streaming.total
    assert streaming.training == bounded.training < bounded.generation.seconds, "groups must end within two steps"
    assert streaming.generation.dropped_tokens == 0
    assert 0.5 < streaming.stale_share < 0.95


def test_partial_rollout_shortens_the_predicted_generation() -> None:
    _, waiting, _ = recipe("rollout.partial.enable=false")
    config, partial, workload = recipe("rollout.partial.over_sampling_factor=1.25")
    assert partial.generation.seconds < 0.85 * waiting.generation.seconds
    assert partial.generation.paused > 0 and waiting.generation.paused == 0
    assert partial.update.total == waiting.update.total
    assert waiting.stale_share == 0 < partial.stale_share < 0.5
    # As many tokens as before, of responses that are as long.
    assert partial.generation.dropped_tokens == 0
    assert partial.generation.mean_length == pytest.approx(waiting.generation.mean_length, rel=0.02)
    # What sampled lengths give over many steps: the responses of a prompt are as alike there.
    engine = EngineModel.from_config(config.rollout.engine, preset("qwen2.5-32b"), parse_machines("H200x8"), 256)
    sampled = RolloutSimulation(engine, 2, workload, seed=1)
    steps = [sampled.collect(workload.groups, "pause", max_age=2, over_sampling=1.25) for _ in range(40)][4:]
    assert partial.generation.seconds == pytest.approx(mean_result(steps).seconds, rel=0.05)


AS_BEFORE = (
    "rollout.partial.enable=false",
    "learner.fuse_old_log_probs=auto",
    "learner.optimizer.use_precision_aware_optimizer=false",
    "learner.max_tokens_per_micro_batch=36864",
    "learner.recompute.method=uniform",
    "learner.recompute.num_layers=1",
    "weight_sync.bucket_bytes=536870912",
)


@pytest.mark.parametrize(
    ("name", "gpus", "before", "share"),
    [
        ("qwen2.5_32b_8xh200", "H200x8", 334.7, 0.70),
        ("qwen2.5_32b_2x8h100", "H100x16", 234.9, 0.75),
        ("qwen3_14b_8x80gb", "H100x8", 242.8, 0.70),
        ("qwen3_1.7b_1x80gb", "H100x1", 178.4, 0.82),
        ("qwen3_0.6b_1x24gb", "L4x1", 201.6, 0.87),
        ("qwen3_30b_a3b_2x8h100", "H100x16", 176.9, 0.70),
        ("qwen3_30b_a3b_8x80gb", "H100x8", 228.3, 0.75),
        ("qwen2.5_72b_16x8h100", "H100x128", 772.9, 0.80),
        ("qwen3_235b_a22b_16x8h100", "H100x128", 1588.9, 0.90),
    ],
)
def test_the_recipes_settings_win_time(name: str, gpus: str, before: float, share: float) -> None:
    """docs/planning.md has the seconds with and without them."""
    seconds = []
    for overrides in (AS_BEFORE, ()):
        config = load_config(f"configs/retool_{name}.yaml", overrides)
        _, architecture = resolve_architecture(config.model, config.demo)
        layout, workload = config.learner.layout(architecture), workload_of(config)
        step = predict_step(config, architecture, layout, parse_machines(gpus), workload)
        seconds.append(step.total)
        assert step.generation.dropped_tokens == 0
    assert seconds[0] == pytest.approx(before, rel=0.001)
    assert seconds[1] < share * seconds[0]


def test_weights_travel_slower_through_files() -> None:
    seconds = {method: recipe(f"weight_sync.method={method}")[1].weight_sync for method in ("tensor", "disk")}
    assert seconds["disk"] > 5 * seconds["tensor"]
    assert WeightSyncConfig().bucket_bytes > 0


def test_weights_that_are_not_gathered_travel_faster() -> None:
    apart = ("cluster.placement=disaggregated", "learner.world_size=8", "learner.context_parallel_size=1")
    seconds = {
        method: recipe(f"weight_sync.method={method}", *apart)[1].weight_sync for method in ("distributed", "sharded")
    }
    assert 0.5 * seconds["distributed"] < seconds["sharded"] < seconds["distributed"]


@pytest.mark.parametrize("method", ["tensor", "disk"])
def test_an_adapter_travels_in_a_fraction_of_the_time(method: str) -> None:
    lora = ("learner.lora.rank=32", f"weight_sync.method={method}")
    merged, alone = (recipe(*lora, f"learner.lora.sync={sync}")[1].weight_sync for sync in ("merged", "adapter"))
    assert 0 < alone < merged / 30


def test_a_run_is_its_steps_validations_and_checkpoints() -> None:
    config, step, workload = recipe("trainer.test_freq=5", "trainer.save_freq=30", "trainer.val_before_train=true")
    machines = parse_machines("H200x8")
    run = predict_run(config, preset("qwen2.5-32b"), machines, workload, step.total, 60, validation_prompts=30)
    assert (run.validations, run.checkpoints) == (13, 2)
    # 32.8 B parameters of 14 bytes at 2 GB/s.
    assert run.checkpoint_seconds == pytest.approx(32.76e9 * 14 / 2e9, rel=0.01)
    assert run.hours == pytest.approx(
        (60 * step.total + 13 * run.validation_seconds + 2 * run.checkpoint_seconds) / 3600
    )
    assert 100 < run.validation_seconds < 600
    config = recipe("trainer.test_freq=10", "trainer.quick_test_freq=4", "trainer.save_freq=30")[0]
    quick = predict_run(config, preset("qwen2.5-32b"), machines, workload, step.total, 60, validation_prompts=30)
    assert (quick.validations, quick.quick_validations) == (7, 12)
    assert 0 < quick.quick_validation_seconds < quick.validation_seconds == run.validation_seconds
    seconds = 7 * quick.validation_seconds + 12 * quick.quick_validation_seconds + 2 * quick.checkpoint_seconds
    assert quick.hours == pytest.approx((60 * step.total + seconds) / 3600)
    config = recipe("trainer.save_freq=30", "trainer.save_weights_freq=10")[0]
    weights = predict_run(config, preset("qwen2.5-32b"), machines, workload, step.total, 60)
    assert weights.weights_checkpoint_seconds == pytest.approx(32.76e9 * 2 / 2e9, rel=0.01)
    seconds = 2 * weights.checkpoint_seconds + 6 * weights.weights_checkpoint_seconds
    assert weights.hours == pytest.approx((60 * step.total + seconds) / 3600)


def test_hardware_has_sources_and_sane_ratios() -> None:
    for accelerator in ACCELERATORS.values():
        assert accelerator.source
        assert accelerator.inter_node_bandwidth <= accelerator.intra_node_bandwidth <= accelerator.bandwidth
        assert accelerator.fp8_flops in (0.0, pytest.approx(2 * accelerator.flops, rel=0.01))
