"""Asynchronous training over steps, weights and checkpoints: ages, what is taken, and what a new process continues."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_retool.config import ConfigError, load_config
from megatron_retool.loop.asynchronous import AsyncExperience, age_metrics, step_source
from megatron_retool.loop.experience import Collected
from megatron_retool.trajectory import Trajectory, write_trajectories
from run_files.steps import step_path
from tests.kit.abortable_engine import AbortableEngine
from tests.loop.test_partial_rollout import GROUPS, SIZE, Loop


class AsyncLoop(Loop):
    """Two groups of three have a signal where dynamic sampling asks for one."""

    def __init__(self, tokenizer, engine: AbortableEngine, train_file, *overrides: str) -> None:
        super().__init__(
            tokenizer, engine, train_file, "rollout.partial.enable=false", "trainer.mode=async", *overrides,
        )  # fmt: skip
        self.run.weights = SimpleNamespace(version=0)

    @staticmethod
    def score(group: list[Trajectory]) -> None:
        for trajectory in group:
            trajectory.reward = float(trajectory.index * bool(trajectory.group_id % 3))

    async def collected(self, count: int, *, saves: bool = True, waits: bool = False) -> list[Collected]:
        """What ``count`` steps are handed; the weights of each arrive before the next is taken.

        With ``waits`` a group is complete and not taken at each checkpoint.
        """
        state = await self.restored()
        self.engine.version = self.run.weights.version = state.step
        taken = []
        async with step_source(self.run, state, self.checkpointer.newest) as source:
            for _ in range(count):
                state.step += 1
                taken.append(await source.take(state.step))
                self.engine.version = self.run.weights.version = state.step
                source.weights_arrived()
                while waits and not source.at_checkpoint(taken[-1]).buffered_versions:
                    await asyncio.sleep(0.01)
                if saves:
                    await self.save(state, source.at_checkpoint(taken[-1]))
        await self.rollout.close()
        return taken


def ids(trajectories: list[Trajectory]) -> list[int]:
    found = list(dict.fromkeys(trajectory.group_id for trajectory in trajectories))
    assert len(trajectories) == SIZE * len(found), "lost or doubled"
    return found


def ages(steps: list[Collected], first: int = 1) -> list[int]:
    return [
        step - 1 - min(int(t.weight_versions[t.loss_mask].min()) for t in collected.kept)
        for step, collected in enumerate(steps, first)
    ]


@pytest.mark.parametrize("max_age", [1, 3])
def test_no_token_is_too_old_and_every_group_is_taken_once(tokenizer, prompts_file, max_age):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            loop = AsyncLoop(tokenizer, engine, prompts_file, f"trainer.max_age={max_age}")
            return await loop.collected(5)

    steps = asyncio.run(scenario())
    taken = sum((ids(step.kept) for step in steps), [])
    assert len(taken) == len(set(taken)) == 5 * GROUPS
    assert max(ages(steps)) <= max_age
    assert [step.metrics["async/age_max"] for step in steps] == ages(steps)
    assert all(step.metrics["async/slots"] <= GROUPS * (max_age + 1) for step in steps)


def test_a_group_starts_when_engines_have_a_place_for_it(tokenizer, prompts_file):
    """Five batches of slots would let many groups wait for a place, and become old meanwhile."""

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            one_at_a_time = f"rollout.max_concurrent_trajectories={SIZE}"
            loop = AsyncLoop(tokenizer, engine, prompts_file, "trainer.max_age=4", one_at_a_time)
            return await loop.collected(5)

    steps = asyncio.run(scenario())
    assert max(ages(steps)) <= 1
    assert all(step.metrics["async/slots"] <= GROUPS + 1 for step in steps)


def test_groups_without_a_signal_are_stored_with_a_step_and_replaced(tokenizer, prompts_file):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            loop = AsyncLoop(tokenizer, engine, prompts_file, "algorithm.dynamic_sampling.enable=true")
            return await loop.collected(4)

    steps = asyncio.run(scenario())
    assert all(len(ids(step.kept)) == GROUPS for step in steps)
    assert all(group_id % 3 for step in steps for group_id in ids(step.kept))
    examined = sum((ids(step.generated) for step in steps), [])
    assert len(examined) == len(set(examined))
    assert any(group_id % 3 == 0 for group_id in examined)


def test_a_new_process_continues_with_the_buffer(tokenizer, prompts_file):
    """Groups that were complete and not trained are trained as they are; those under way start again."""

    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            settings = ("algorithm.dynamic_sampling.enable=true", "trainer.max_age=2")
            first = AsyncLoop(tokenizer, engine, prompts_file, *settings)
            before = await first.collected(3, waits=True)
            lost = AsyncLoop(tokenizer, engine, prompts_file, *settings)
            await lost.collected(1, saves=False)
            second = AsyncLoop(tokenizer, engine, prompts_file, *settings)
            held = second.checkpointer.newest
            versions = held.read("trainer_state.json").get("buffered_versions", {})
            position = held.read("prompt_source.json")
            return before, versions, position, await second.collected(3)

    before, versions, position, after = asyncio.run(scenario())
    steps = before + after
    assert max(ages(steps)) <= 2
    examined = sum((ids(step.generated) for step in steps), [])
    assert len(examined) == len(set(examined)), "trained or stored twice"
    assert {int(group_id) for group_id in versions} <= set(position["again"])
    # Every prompt up to the first one that is still open is accounted for.
    assert set(range(min(set(range(999)) - set(examined)))) <= set(examined)
    taken = sum((ids(step.kept) for step in after), [])
    assert {int(group_id) for group_id in versions} & set(taken), "the buffer was dropped"


def test_what_ends_the_stream_ends_the_step(tokenizer, prompts_file):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            loop = AsyncLoop(tokenizer, engine, prompts_file)

            def fail(group: list[Trajectory]) -> None:
                raise OSError("the reward's process is gone")

            loop.run.rewards.score = fail
            await asyncio.wait_for(loop.collected(1), 60)

    with pytest.raises(OSError, match="reward's process"):
        asyncio.run(scenario())


def test_nothing_is_started_beyond_the_last_step(tokenizer, prompts_file):
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            loop = AsyncLoop(tokenizer, engine, prompts_file, "trainer.max_age=9")
            loop.run.total_steps = 3
            steps = await loop.collected(3)
            return steps, loop.run.prompts.state_dict()["drawn"]

    steps, drawn = asyncio.run(scenario())
    assert drawn == 3 * GROUPS
    assert steps[-1].metrics["async/slots"] == 0


def test_a_recorded_order_is_replayed(tokenizer, prompts_file):
    """The same groups in the same order, and a checkpoint in between that knows which prompts are open."""

    async def scenario(folder):
        async with AbortableEngine(tokenizer) as engine:
            settings = ("algorithm.dynamic_sampling.enable=true", "trainer.max_age=2")
            recorded = await AsyncLoop(tokenizer, engine, prompts_file, *settings).collected(4)
            for step, collected in enumerate(recorded, 1):
                write_trajectories(collected.generated, step_path(folder, step))
            again = (*settings, f"rollout.replay_dir={folder}", "trainer.experiment_name=again")
            first = await AsyncLoop(tokenizer, engine, prompts_file, *again).collected(2)
            return recorded, first + await AsyncLoop(tokenizer, engine, prompts_file, *again).collected(2)

    recorded, replayed = asyncio.run(scenario(prompts_file.parent / "recorded"))
    for one, other in zip(recorded, replayed, strict=True):
        for name in ("kept", "generated"):
            rows = [
                [(t.key, t.response_ids.tolist(), t.rollout_log_probs.tolist(), t.reward) for t in getattr(step, name)]
                for step in (one, other)
            ]
            assert rows[0] == rows[1]


def test_a_token_beyond_the_bound_is_a_fault():
    trajectory = SimpleNamespace(weight_versions=np.array([3, -1, 4]), loss_mask=np.array([True, False, True]))
    assert age_metrics([trajectory], 5, 1) == {"async/age_mean": 0.5, "async/age_max": 1.0}
    with pytest.raises(RuntimeError, match="2 updates old"):
        age_metrics([trajectory], 6, 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.staleness=1", "trainer.max_age"),
        ("rollout.partial.enable=true", "nothing to pause"),
        ("algorithm.dynamic_sampling.surplus=next_step", "buffer"),
        ("trainer.deterministic=true", "which groups a step takes"),
    ],
)
def test_settings_that_do_not_go_with_it(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(None, ["trainer.mode=async", override])
    assert words in str(error.value)


def test_max_age_without_async_is_read_by_nothing() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.mode=async"):
        load_config(None, ["trainer.max_age=3"])


def test_the_source_is_the_modes(tokenizer, prompts_file) -> None:
    async def scenario():
        async with AbortableEngine(tokenizer) as engine:
            loop = AsyncLoop(tokenizer, engine, prompts_file)
            return step_source(loop.run, await loop.restored(), None)

    assert isinstance(asyncio.run(scenario()), AsyncExperience)
