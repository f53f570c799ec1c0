"""The main job, for real: a run, a kill and resume, an interrupt, and things that go wrong at start."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time

import numpy as np
import pytest
from ray.cluster_utils import Cluster
from safetensors.numpy import load_file

from megatron_retool.runs.metrics_file import read_metrics
from megatron_retool.trajectory import read_trajectories
from tests.end_to_end.conftest import FinishedRun, kill_driver, pids_of, wait_until_gone
from tests.kit.processes import descendants_named

pytestmark = pytest.mark.timeout(1800)


def steps(run_dir):
    return {row["step"]: row for row in read_metrics(run_dir / "metrics.jsonl")}


def test_every_step_is_logged_and_engine_and_learner_agree(demo_run: FinishedRun):
    rows = steps(demo_run.run_dir)
    assert sorted(rows) == [0, 1, 2, 3]
    for step in (1, 2, 3):
        row = rows[step]
        # Same weights, ids, masks and positions on both sides, also after updates and syncs: nothing else gives this.
        assert row["rollout_corr/log_prob_abs_diff"] < 1e-4
        assert row["actor/grad_norm"] > 0
        for name in (
            "critic/score/mean", "critic/advantages/max", "actor/pg_loss", "actor/pg_clipfrac", "actor/ppo_kl",
            "actor/entropy", "actor/lr", "response_length/mean", "prompt_length/mean", "num_turns/mean", "tool/calls",
            "tool/success_rate", "timing_s/gen", "timing_s/reward", "timing_s/old_log_prob", "timing_s/adv",
            "timing_s/update_actor", "timing_s/weight_sync", "timing_s/step", "timing_s/save_checkpoint",
            "perf/throughput", "perf/total_num_tokens", "global_seqlen/mean", "rollout_corr/k3_kl",
            "rollout_corr/masked_fraction", "dynamic_sampling/generated_groups", "perf/samples_per_second",
            "perf/max_process_memory_gb", "code/ratio", "code/first_call_position", "code/purpose/calculation",
            "timing_s/agent_loop/slowest/tool_calls",
        ):  # fmt: skip
            assert row.get(name) is not None, name
    # The first sync's check belongs to the first row, and there are no other engines.
    assert 0 <= rows[1]["weight_sync/log_prob_difference_max"] < 1e-4
    assert "weight_sync/log_prob_difference_max" not in rows[2]
    for row in (rows[0], rows[3]):
        assert {"val-core/all/acc/mean@2", "val-aux/num_turns/mean", "val-aux/code/ratio"} <= row.keys()
        assert "val-quick/all/acc/mean@4" not in row
    assert "val-quick/all/acc/mean@4" in rows[2] and "val-core/all/acc/mean@2" not in rows[2]
    assert rows[2]["timing_s/testing_quick"] > 0


def test_rollouts_on_disk_carry_the_version_that_sampled_them(demo_run: FinishedRun):
    for step in (1, 2, 3):
        trajectories = read_trajectories(demo_run.run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert len(trajectories) == 4 * 8
        for t in trajectories:
            assert set(t.weight_versions[t.loss_mask]) == {step - 1}
            assert np.all(t.weight_versions[~t.loss_mask] == -1)
            assert len(t.response_ids) <= 160
    calls = [call for t in trajectories for call in t.tool_calls]
    assert calls, "the model was taught to call the tool and never did"


def test_run_leaves_everything_behind(demo_run: FinishedRun):
    run_dir = demo_run.run_dir
    for name in (
        "config.yaml",
        "tensorboard",
        "report/index.html",
        "report/validation_problems.png",
        "validation_quick/step_000002.parquet",
        "export/config.json",
        "validation/step_000003.parquet",
    ):
        assert (run_dir / name).exists(), name
    assert (run_dir / "validation" / "step_000003.parquet").exists()
    state = json.loads((run_dir / "checkpoints/global_step_3/trainer_state.json").read_text())
    assert state["step"] == 3
    assert "seconds by stage" in demo_run.output and "step 3, " in demo_run.output


def test_weights_alone_and_profile_of_the_second_step(demo_run: FinishedRun):
    run_dir = demo_run.run_dir
    complete, alone = (run_dir / "checkpoints" / name for name in ("global_step_2/learner", "weights_step_2"))
    parts = list(alone.glob("*.distcp"))
    assert parts and all(part.samefile(complete / part.name) for part in parts)
    rows = steps(run_dir)
    assert 0 < rows[2]["checkpoint/weights_size_gb"] < rows[2]["checkpoint/size_gb"] / 2
    assert "checkpoint/weights_size_gb" not in rows[3] and rows[3]["checkpoint/seconds"] > 0
    assert "of only weights, in files of global_step_2 (compressed by zstd)" in " ".join(demo_run.output.split())

    profile = run_dir / "profile"
    page = (profile / "step_000002.md").read_text()
    for words in ("| gen |", "## learner rank 0", "| update_actor |", "| weight_sync |", "`aten::"):
        assert words in page, words
    with gzip.open(profile / "step_000002_rank0.json.gz") as packed:
        names = {event.get("name") for event in json.load(packed)["traceEvents"]}
    passes = {"old_log_prob"} if rows[2]["actor/fused_old_log_probs"] < 1.0 else set()
    assert {"update_actor", "weight_sync", "aten::mm"} | passes <= names
    assert "profile of step 2" in demo_run.output and len(list(profile.iterdir())) == 2


def test_export_is_the_trained_model(demo_run: FinishedRun):
    """The exported weights give the log-probs that the engine had for the last version it served."""
    import torch
    from transformers import AutoModelForCausalLM

    trajectories = read_trajectories(demo_run.run_dir / "validation" / "step_000003.parquet")
    model = AutoModelForCausalLM.from_pretrained(demo_run.run_dir / "export", dtype=torch.float32)
    for t in trajectories[:4]:
        ids = torch.from_numpy(np.concatenate([t.prompt_ids, t.response_ids]).astype(np.int64))
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0].log_softmax(-1)
        start = len(t.prompt_ids)
        mine = log_probs[start - 1 : -1].gather(1, ids[start:, None])[:, 0].numpy()
        np.testing.assert_allclose(mine[t.loss_mask], t.rollout_log_probs[t.loss_mask], atol=1e-4)


def test_second_run_has_nothing_to_do(demo_run: FinishedRun):
    """Every stage's result is there already: no process is started, the summary is printed again."""
    start = time.monotonic()
    code, output = demo_run.command_line.run("pipeline", "learner.optimizer.lr=5e-5")
    assert code == 0, output
    assert time.monotonic() - start < 30
    assert "seconds by stage" in output
    assert "  learner.optimizer.lr: " in output and ", now 5e-05\n" in output
    assert "global_step_3 is the last step already (3 steps): nothing to train, and these settings have" in output


@pytest.mark.slow
def test_a_second_run_that_is_killed_in_between_is_the_first_one_bit_by_bit(demo_run: FinishedRun):
    """The same seed, SIGKILL to the driver after a checkpoint, and on: nothing that was learnt differs."""
    run_dir = demo_run.copy("killed", upto=None)
    (run_dir / "metrics.jsonl").unlink()
    again = [
        f"trainer.experiment_name={run_dir.name}",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        f"model.mcore_path={demo_run.run_dir / 'sft_mcore'}",
        "trainer.val_before_train=false",
        "trainer.async_save=true",
        "trainer.at_end=[export]",
    ]
    process, marker = demo_run.command_line.start("train", *again)
    deadline = time.monotonic() + 300
    while not (run_dir / "checkpoints/global_step_1/COMPLETE").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kill_driver(process, marker)

    code, output = demo_run.command_line.run("train", *again)
    assert code == 0, output
    assert "resuming from" in output
    uninterrupted, resumed = steps(demo_run.run_dir), steps(run_dir)
    assert sorted(resumed) == [1, 2, 3]
    for step in resumed:
        assert learnt(resumed[step]) == learnt(uninterrupted[step])
        assert {"actor/grad_norm", "rollout_corr/k3_kl", "rollout/acc/mean"} <= learnt(resumed[step]).keys()
        stored = f"rollouts/step_{step:06d}.parquet"
        there = read_trajectories(demo_run.run_dir / stored)
        for one, other in zip(read_trajectories(run_dir / stored), there, strict=True):
            for column in ("prompt_ids", "response_ids", "loss_mask", "rollout_log_probs", "weight_versions"):
                assert np.array_equal(getattr(one, column), getattr(other, column)), (step, column)
            assert (one.reward, one.finish_reason) == (other.reward, other.finish_reason)
    ours, theirs = (load_file(each / "export" / "model.safetensors") for each in (run_dir, demo_run.run_dir))
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def learnt(row: dict[str, float]) -> dict[str, float]:
    """Metrics that time and caches have no part in."""
    of_time = (
        "timing",
        "perf/",
        "checkpoint/",
        "rollout/cache",
        "weight_sync/",
        "tool/seconds",
        "tool/sandbox",
        "val-",
    )
    return {name: value for name, value in row.items() if not name.startswith(of_time)}


@pytest.mark.slow
def test_interrupt_leaves_no_process(demo_run: FinishedRun):
    run_dir = demo_run.copy("interrupted", upto=None)
    process, marker = demo_run.command_line.start(
        "train",
        f"trainer.experiment_name={run_dir.name}",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
    )
    deadline = time.monotonic() + 300
    while not list((run_dir / "rollouts").glob("*.parquet")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    left = wait_until_gone(marker, 15 - (time.monotonic() - start))
    assert left == {} and time.monotonic() - start < 15
    assert process.returncode == 130
    assert "stopped" in output and "Traceback" not in output


HELD_ADVANTAGE = """
import pathlib
import time

from megatron_retool.algorithms.advantages import group_relative
from megatron_retool.registry import needs


@needs("groups")
def held(batch, *, folder):
    while (pathlib.Path(folder) / "hold").exists():
        (pathlib.Path(folder) / "held").touch()
        time.sleep(0.05)
    return batch.per_token(group_relative(batch.scores, batch.group_ids, normalize_by_std=True))
"""
"""Between generation and weight sync, where nobody speaks to the engine, the driver waits until a file is gone."""


@pytest.mark.slow
def test_death_of_engine_and_sandbox_does_not_stop_the_run(demo_run: FinishedRun, tmp_path):
    """Sandbox, engine and the engine's actor are killed: they come back, and no trajectory is lost or doubled."""
    (tmp_path / "advantage.py").write_text(HELD_ADVANTAGE)
    process, marker = demo_run.command_line.start(
        "train",
        "trainer.experiment_name=wounded",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        "trainer.val_before_train=false",
        "trainer.total_steps=5",
        "trainer.save_freq=0",
        "trainer.quick_test_freq=0",
        "trainer.deterministic=false",
        f"algorithm.advantage={tmp_path}/advantage.py:held",
        f"algorithm.advantage_kwargs={{folder: {tmp_path}}}",
    )
    run_dir = demo_run.run_dir.with_name("wounded")
    deadline = time.monotonic() + 800

    def wait_for(condition) -> None:
        while not condition():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def kill(words: str) -> None:
        pids = pids_of(marker, words)
        assert pids, words
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    wait_for((run_dir / "rollouts/step_000001.parquet").exists)
    kill("code_interpreter.server")
    (tmp_path / "hold").touch()
    wait_for((tmp_path / "held").exists)
    kill("sglang.launch_server")
    (tmp_path / "hold").unlink()
    wait_for((run_dir / "rollouts/step_000003.parquet").exists)
    for worker in descendants_named(process.pid, "ray::EngineWorker"):
        worker.kill()
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert wait_until_gone(marker, 15) == {}
    assert "weight sync failed, restarting http://127.0.0.1" in output and "building the learner again" not in output
    for step in (1, 2, 3, 4, 5):
        trajectories = read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert len({(t.group_id, t.index) for t in trajectories}) == len(trajectories) == 4 * 8
        assert steps(run_dir)[step]["rollout_corr/log_prob_abs_diff"] < 1e-4
    assert steps(run_dir)[5]["tool/success_rate"] > 0


@pytest.mark.rare
def test_death_of_a_node_that_ran_a_sandbox_does_not_stop_the_run(demo_run: FinishedRun):
    """Two Ray nodes: learner and engine on the first, a sandbox on each; the second is killed after step 1."""
    noticed_soon = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500}
    nodes = Cluster()
    try:
        nodes.add_node(num_cpus=4, node_name="first", include_dashboard=False, _system_config=noticed_soon)
        second = nodes.add_node(num_cpus=4, node_name="second")
        process, marker = demo_run.command_line.start(
            "train",
            "trainer.experiment_name=severed",
            f"demo.directory={demo_run.run_dir / 'data'}",
            f"model.path={demo_run.run_dir / 'sft_hf'}",
            "trainer.val_before_train=false",
            "trainer.total_steps=3",
            "learner.world_size=1",
            "cluster.nodes=2",
            "weight_sync.method=distributed",
            f"cluster.ray_address={nodes.address}",
        )
        run_dir = demo_run.run_dir.with_name("severed")
        deadline = time.monotonic() + 300
        while not (run_dir / "rollouts/step_000001.parquet").exists():
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        nodes.remove_node(second, allow_graceful=False)
        output, _ = process.communicate(timeout=600)
    finally:
        nodes.shutdown()
    assert process.returncode == 0, output
    assert wait_until_gone(marker, 15) == {}
    table = [line.split() for line in output.splitlines() if "│ sandbox" in line]
    assert [(row[3], row[5]) for row in table] == [("0", "0"), ("1", "1")]
    assert "second left Ray: code runs in the sandboxes of the other nodes" in output
    rows = steps(run_dir)
    assert sorted(rows) == [1, 2, 3]
    assert rows[1]["tool/sandbox_0/requests"] > 0 and rows[1]["tool/sandbox_1/requests"] > 0
    for step in (1, 2, 3):
        trajectories = read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert len({(t.group_id, t.index) for t in trajectories}) == len(trajectories) == 4 * 8
    assert rows[3]["tool/sandboxes_up"] == 1 and rows[3]["tool/success_rate"] > 0


@pytest.mark.slow
def test_death_of_a_learner_rank_does_not_stop_the_run(demo_run: FinishedRun):
    """One of two ranks, which send engines their own parts of the weights, is killed after step 3: the run goes on from
    step 2's checkpoint, with the same engine."""
    process, marker = demo_run.command_line.start(
        "train",
        "trainer.experiment_name=bereft",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
        "trainer.val_before_train=false",
        "trainer.total_steps=5",
        "trainer.save_freq=2",
        "learner.tensor_model_parallel_size=2",
        "weight_sync.method=sharded",
    )
    run_dir = demo_run.run_dir.with_name("bereft")
    deadline = time.monotonic() + 300
    while not (run_dir / "rollouts/step_000003.parquet").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    engine = pids_of(marker, "sglang.launch_server")
    ranks = descendants_named(process.pid, "ray::LearnerWorker")
    assert len(ranks) == 2
    ranks[1].kill()
    while not (run_dir / "rollouts/step_000004.parquet").exists():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert pids_of(marker, "sglang.launch_server") == engine
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    assert wait_until_gone(marker, 15) == {}
    assert "learner rank" in output and "building the learner again (1 of 3)" in output
    assert "global_step_2 (step 2 of 5)" in output
    rows = read_metrics(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for step in (1, 2, 3, 4, 5):
        trajectories = read_trajectories(run_dir / "rollouts" / f"step_{step:06d}.parquet")
        assert len({(t.group_id, t.index) for t in trajectories}) == len(trajectories) == 4 * 8
        assert {version for t in trajectories for version in t.weight_versions[t.loss_mask]} == {step - 1}
        assert rows[step - 1]["rollout_corr/log_prob_abs_diff"] < 1e-4
    # The prompts went back to step 2 as well: none is skipped, none is taken twice.
    assert {t.group_id for t in trajectories} == set(range(16, 20))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        pytest.param(
            ["rollout.engine.extra_args=[--no-such-flag]"], ["engine", "--no-such-flag"], marks=pytest.mark.slow
        ),
        (["tools.code_interpreter.url=http://127.0.0.1:9"], ["127.0.0.1:9", "tools.code_interpreter.url"]),
        (["data.train_files=[nowhere.parquet]"], ["nowhere.parquet"]),
        (["model.path={run}/rollouts"], ["config.json", "model.path"]),
        (["reward.function=nowhere.py:f"], ["nowhere.py"]),
        (["data.max_prompt_length=8", "data.overlong_prompts=error"], ["max_prompt_length"]),
    ],
    ids=["engine_dies", "sandbox_silent", "no_file", "no_model", "no_reward_function", "overlong_prompt"],
)
def test_bad_start_is_one_clear_message(demo_run: FinishedRun, overrides, words):
    common = [
        "trainer.experiment_name=bad",
        f"demo.directory={demo_run.run_dir / 'data'}",
        f"model.path={demo_run.run_dir / 'sft_hf'}",
    ]
    code, output = demo_run.command_line.run(
        "train", *common, *(o.format(run=demo_run.run_dir) for o in overrides), timeout=180
    )
    assert code == 1
    assert "Traceback" not in output, output
    message = output[output.index("error:") :]
    for word in words:
        assert word in message, output
