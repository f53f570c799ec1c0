"""Partial rollout over steps, checkpoints and a new process: which prompts are drawn, and what becomes of each."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.config import load_config
from megatron_retool.data.prompts import PromptSource
from megatron_retool.loop.experience import Collected, collect_groups
from megatron_retool.loop.resume import contents_after, restore
from megatron_retool.loop.state import TrainerState
from megatron_retool.runs.checkpointer import Checkpointer
from megatron_retool.runs.checkpoints import complete_checkpoints, find_resume_point
from megatron_retool.trajectory import Trajectory
from sglang_rollout.agent.paused_groups import read_paused_groups
from sglang_rollout.rollout_manager import RolloutManager
from tests.kit.abortable_engine import AbortableEngine
from tests.kit.scripted import ScriptedTools
from tools.registry import ToolRegistry

GROUPS, SIZE = 3, 2


class FakeLearner:
    async def save(self, directory: Path, *, asynchronous: bool) -> None:
        directory.mkdir()

    async def finish_save(self) -> None:
        pass

    async def load(self, directory: Path) -> None:
        assert directory.is_dir()


class Loop:
    """Rollout, reward, data and checkpoints of a run, as a process has them; the learner learns nothing."""

    def __init__(self, tokenizer, engine: AbortableEngine, train_file: Path, *overrides: str) -> None:
        config = load_config(
            None,
            [
                f"trainer.runs_dir={train_file.parent}",
                "trainer.keep_checkpoints=9",
                f"data.train_files=[{train_file}]",
                f"data.train_batch_size={GROUPS}",
                f"rollout.train.n={SIZE}",
                f"learner.mini_batch_size={GROUPS * SIZE}",
                "algorithm.dynamic_sampling.enable=false",
                "rollout.partial.enable=true",
                "rollout.partial.over_sampling_factor=2",
                "rollout.partial.max_age=9",
                "rollout.engine.random_seed=7",
                *overrides,
            ],
        )
        self.engine = engine
        self.rollout = RolloutManager(config, tokenizer, [engine.url], ScriptedTools())
        self.run: Any = SimpleNamespace(
            config=config,
            console=Console(quiet=True),
            watchdog=SimpleNamespace(progress=lambda phase: None),
            gpu_phases=GpuPhases(False, list, list),
            rollout=self.rollout,
            prompts=PromptSource(config.data, tokenizer, ToolRegistry([]), config.trainer.seed),
            rewards=SimpleNamespace(score=self.score, take_metrics=dict),
            tools=SimpleNamespace(take_metrics=dict),
            total_steps=99,
        )
        learner, resume = FakeLearner(), find_resume_point(config.trainer)
        self.checkpointer = Checkpointer(config, self.run.console, lambda: {"learner": learner}, resume)

    @staticmethod
    def score(group: list[Trajectory]) -> None:
        for trajectory in group:
            trajectory.reward = float(trajectory.index)

    async def steps(self, count: int, saving: bool = True) -> tuple[list[list[Trajectory]], list[dict[str, float]]]:
        """The trajectories and the metrics of each step from the last checkpoint on."""
        state = await restore(self.run, self.checkpointer)
        taken, metrics = [], []
        for _ in range(count):
            state.step += 1
            self.engine.version = state.step - 1
            collected = await collect_groups(self.run, state, state.step)
            taken.append(collected.generated)
            metrics.append(collected.metrics)
            if saving:
                await self.save(state, collected)
        return taken, metrics

    async def save(self, state: TrainerState, collected: Collected) -> None:
        await self.checkpointer.save(state.step, contents_after(self.run, state, collected), wait=True)

    async def restored(self) -> TrainerState:
        return await restore(self.run, self.checkpointer)


def groups_of(steps: list[list[Trajectory]]) -> list[int]:
    """Group ids of the steps' whole groups, one by one."""
    members: dict[int, list[int]] = {}
    for trajectory in (trajectory for step in steps for trajectory in step):
        members.setdefault(trajectory.group_id, []).append(trajectory.index)
    assert all(indices == list(range(SIZE)) for indices in members.values()), "lost or doubled"
    return list(members)


def test_a_resumed_run_goes_on_with_what_was_paused(tokenizer, prompts_file):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            first = Loop(tokenizer, engine, prompts_file)
            before, rows = await first.steps(3)
            await first.rollout.close()
            # A step that no checkpoint knows of: its process is killed.
            lost = Loop(tokenizer, engine, prompts_file)
            await lost.steps(1, saving=False)
            await lost.rollout.close()
            second = Loop(tokenizer, engine, prompts_file)
            checkpoint = second.checkpointer.newest
            after, more_rows = await second.steps(3)
            await second.rollout.close()
            return engine, before, checkpoint, after, rows + more_rows, second

    engine, before, checkpoint, after, rows, second = asyncio.run(scenario())
    assert checkpoint.step == 3
    paused = {
        (state.group_id, state.index): state
        for group in read_paused_groups(checkpoint.paused_groups)
        for state in group.states
    }
    assert len(paused) == GROUPS * SIZE
    done = groups_of(before + after)
    assert len(done) == 6 * GROUPS
    # 2 x 3 groups are always under way, so 6 steps draw 6 x 3 + 3 prompts; each is done, or waits in the checkpoint.
    last = complete_checkpoints(second.run.config.trainer.run_dir)[-1]
    position = last.read("prompt_source.json")
    waiting = [group.group_id for group in read_paused_groups(last.paused_groups)]
    assert position["drawn"] == 6 * GROUPS + GROUPS and sorted(position["again"]) == sorted(waiting)
    assert sorted(done + waiting) == list(range(position["drawn"]))
    continued = 0
    for trajectory in (trajectory for step in after for trajectory in step):
        sampled = trajectory.loss_mask
        state = paused.get((trajectory.group_id, trajectory.index))
        seed = second.rollout.group_factory.seed(trajectory.group_id, trajectory.index)
        ids, log_probs = engine.answer(seed)
        assert trajectory.response_ids[sampled].tolist() == ids
        assert trajectory.rollout_log_probs[sampled].tolist() == pytest.approx(log_probs)
        assert trajectory.extra_info["ground_truth"] == str(trajectory.extra_info["index"] + 1)
        if state is not None and state.finish_reason is None:
            known = len(state.response_ids)
            continued += known > 0
            assert trajectory.weight_versions[:known].tolist() == state.weight_versions
            assert min(trajectory.weight_versions[known:][sampled[known:]]) >= 3
    assert continued > 0
    left, resumed = ([row[f"rollout/{name}_trajectories"] for row in rows] for name in ("paused", "resumed"))
    assert min(left) > 0 and resumed == [0, *left[:-1]]


def test_without_partial_rollout_the_paused_prompts_are_drawn_again(tokenizer, prompts_file):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            first = Loop(tokenizer, engine, prompts_file)
            before, _ = await first.steps(1)
            await first.rollout.close()
            second = Loop(tokenizer, engine, prompts_file, "rollout.partial.enable=false")
            after, _ = await second.steps(1)
            await second.rollout.close()
            return before, after, second.run.prompts.state_dict()

    before, after, position = asyncio.run(scenario())
    assert sorted(groups_of(before + after)) == list(range(2 * GROUPS))
    assert position["drawn"] == 2 * GROUPS and position["again"] == []


def test_a_group_is_as_old_as_its_steps_and_not_its_rounds(tokenizer, prompts_file):
    """Rounds of dynamic sampling pause too; max_age counts steps, and what it drops is replaced in the next one."""

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            overrides = ("rollout.partial.max_age=1", "rollout.max_concurrent_trajectories=2")
            loop = Loop(tokenizer, engine, prompts_file, *overrides)
            state = await loop.restored()
            for prompts in (loop.run.prompts.next_batch(4), []):
                async with aclosing(loop.rollout.stream(prompts, loop.run.config.rollout.train)) as stream:
                    await anext(stream)
            kept = [group.age for group in loop.rollout.finish_step()]
            assert kept == [1, 1] and loop.rollout.statistics.dropped_trajectories == 0
            assert loop.rollout.finish_step() == [] and loop.rollout.paused_group_ids == []
            assert loop.rollout.statistics.dropped_trajectories == 2 * SIZE
            state.step = 1
            collected = await collect_groups(loop.run, state, 1)
            await loop.rollout.close()
            return collected

    assert len(asyncio.run(scenario()).generated) == GROUPS * SIZE
