"""Dynamic sampling without rounds, over steps and checkpoints: what is kept does not depend on who finishes first."""

from __future__ import annotations

import asyncio

import pytest

from megatron_retool.loop.experience import Collected, Experience
from megatron_retool.trajectory import Trajectory
from tests.kit.abortable_engine import AbortableEngine
from tests.loop.test_partial_rollout import GROUPS, SIZE, Loop


class FilteringLoop(Loop):
    """Two groups of five have a signal; groups are complete when the engine is through with them."""

    def __init__(self, tokenizer, engine: AbortableEngine, train_file, *overrides: str) -> None:
        super().__init__(
            tokenizer, engine, train_file,
            "algorithm.dynamic_sampling.enable=true", "rollout.partial.enable=false", *overrides,
        )  # fmt: skip

    @staticmethod
    def score(group: list[Trajectory]) -> None:
        for trajectory in group:
            trajectory.reward = float(trajectory.index * (trajectory.group_id % 5 in (1, 4)))

    async def collected(self, count: int) -> list[Collected]:
        """What ``count`` steps are handed, each saved."""
        state = await self.restored()
        taken = []
        async with Experience(self.run, state) as experience:
            for _ in range(count):
                state.step += 1
                self.engine.version = state.step - 1
                taken.append(await experience.take(state.step))
                await self.save(state, taken[-1])
        await self.rollout.close()
        return taken


def ids(trajectories: list[Trajectory]) -> list[int]:
    found = list(dict.fromkeys(trajectory.group_id for trajectory in trajectories))
    assert len(trajectories) == SIZE * len(found), "lost or doubled"
    return found


def steps_of(
    tokenizer, prompts_file, *overrides: str, count: int = 4, seconds_per_token: float = 0.001
) -> list[Collected]:
    async def scenario() -> list[Collected]:
        async with AbortableEngine(tokenizer, seconds_per_token) as server:
            return await FilteringLoop(tokenizer, server, prompts_file, *overrides).collected(count)

    return asyncio.run(scenario())


def test_what_is_kept_and_where_the_data_stand_do_not_depend_on_timing(tokenizer, prompts_file):
    wide = steps_of(tokenizer, prompts_file)
    narrow = steps_of(
        *(tokenizer, prompts_file, "rollout.max_concurrent_trajectories=3", "trainer.experiment_name=narrow"),
        seconds_per_token=0.0003,
    )
    informative = [group_id for group_id in range(99) if group_id % 5 in (1, 4)]
    kept = [ids(step.kept) for step in wide]
    assert sum(kept, []) == informative[: 4 * GROUPS]
    last = kept[-1][-1]
    assert sum((ids(step.generated) for step in wide), []) == list(range(last + 1))
    for one, other in zip(wide, narrow, strict=True):
        assert one.prompt_state == other.prompt_state and one.prompt_state["again"] == []
        assert one.leftover.keep_rate == other.leftover.keep_rate
        for name in ("kept", "generated"):
            rows = [[(t.key, t.response_ids.tolist(), t.reward_info["trained"]) for t in getattr(step, name)]
                    for step in (one, other)]  # fmt: skip
            assert rows[0] == rows[1]
    assert wide[-1].prompt_state["drawn"] == last + 1
    # More was started than what the batches were taken from, and what was not needed was aborted.
    assert sum(step.metrics["dynamic_sampling/aborted_groups"] for step in wide) > 0
    assert wide[-1].metrics["dynamic_sampling/keep_rate"] < 0.6


def test_a_resumed_run_draws_what_the_stopped_one_would_have_drawn(tokenizer, prompts_file):
    whole = steps_of(tokenizer, prompts_file, "trainer.experiment_name=whole", count=4)
    first = steps_of(tokenizer, prompts_file, count=2)
    second = steps_of(tokenizer, prompts_file, count=2)
    for expected, found in zip(whole, [*first, *second], strict=True):
        assert ids(expected.generated) == ids(found.generated)
        assert expected.leftover.keep_rate == found.leftover.keep_rate
        assert expected.prompt_state == found.prompt_state


def test_a_surplus_keeps_its_place_in_the_next_step(tokenizer, prompts_file):
    override = "algorithm.dynamic_sampling.surplus=next_step"
    steps = steps_of(tokenizer, prompts_file, override, count=6)
    assert sum((ids(step.generated) for step in steps), []) == list(range(ids(steps[-1].kept)[-1] + 1))
    carried = [group_id for step in steps[:-1] for group_id in step.leftover.groups]
    assert carried, "nothing was complete beyond a batch"
    for number, (before, step) in enumerate(zip(steps[:-1], steps[1:], strict=True), start=2):
        assert set(before.leftover.groups) <= set(before.prompt_state["again"]), (
            "a resumed run would miss their prompts"
        )
        for row in step.generated:
            old = row.group_id in before.leftover.groups
            assert set(row.weight_versions[row.loss_mask]) == {number - 2 if old else number - 1}
        assert before.metrics["dynamic_sampling/surplus_groups"] >= len(before.leftover.groups)


@pytest.mark.parametrize("staleness", [0, 1])
def test_too_few_groups_with_a_signal_give_a_small_batch(tokenizer, prompts_file, staleness):
    overrides = ("algorithm.dynamic_sampling.max_generation_batches=2", f"rollout.staleness={staleness}")
    steps = steps_of(tokenizer, prompts_file, *overrides, count=2)
    assert [ids(step.kept) for step in steps] == [[1, 4], [6, 9, 11]]
    assert [len(ids(step.generated)) for step in steps] == [6, 6]
