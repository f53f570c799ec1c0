"""A rank that dies: which error is blamed, and where the run continues."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from rich.console import Console

from megatron_retool.cluster import learner_group
from megatron_retool.cluster.learner_failures import LearnerDied, OutOfStep
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.config import load_config
from megatron_retool.loop.faults import LearnerRecovery
from megatron_retool.runs.checkpoints import Checkpoint


def raised_in_actor(cause: Exception) -> Exception:
    return RayTaskError("call", f"Traceback\n{type(cause).__name__}: {cause}", cause).as_instanceof_cause()


async def answer(seconds: float, value: Any) -> Any:
    await asyncio.sleep(seconds)
    if isinstance(value, Exception):
        raise value
    return value


def group_of(*answers: tuple[float, Any]) -> Any:
    """A group whose ranks answer every call after some seconds."""
    group: Any = LearnerGroup.__new__(LearnerGroup)
    group.config, group.role = load_config(None, ["trainer.experiment_name=e"]), "learner"
    group.kill = lambda: setattr(group, "killed", True)
    group.nodes = [f"node{rank}" for rank in range(len(answers))]
    group.workers = [
        SimpleNamespace(values=SimpleNamespace(remote=lambda *_, given=given, **__: answer(*given)))
        for given in answers
    ]
    return group


BATCH: Any = None
GLOO = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer")


def test_death_is_blamed_where_another_rank_fails_first() -> None:
    group = group_of((0.0, raised_in_actor(GLOO)), (0.05, ActorDiedError()), (60.0, None))
    with pytest.raises(LearnerDied, match=r"learner rank 1 on node1 died \(runs/e/logs/learner_rank1.log\)"):
        asyncio.run(asyncio.wait_for(group.values(BATCH), 5))
    assert group.killed  # else rank 2 would continue waiting, and with it every later call


def test_broken_links_count_as_a_death() -> None:
    with pytest.raises(LearnerDied, match="rank 0 on node0 lost its device or its links.*Connection closed"):
        asyncio.run(group_of((0.0, raised_in_actor(GLOO)), (0.0, raised_in_actor(GLOO))).values(BATCH))


def test_an_error_of_the_code_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "DEATH_NOTICE_SECONDS", 0.1)
    group = group_of((60.0, None), (0.0, raised_in_actor(ValueError("the mini-batch lacks old_log_probs"))))
    with pytest.raises(ValueError, match="lacks old_log_probs"):
        asyncio.run(asyncio.wait_for(group.values(BATCH), 5))


def test_a_rank_that_leaves_the_others_waiting_is_as_good_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_group, "DEATH_NOTICE_SECONDS", 0.1)
    group = group_of((60.0, None), (0.0, raised_in_actor(OutOfStep("the weights could not be exported: no memory"))))
    with pytest.raises(LearnerDied, match="rank 1 on node1 left the others waiting.*no memory"):
        asyncio.run(asyncio.wait_for(group.values(BATCH), 5))
    assert group.killed


def test_errors_that_only_quote_gloo_are_no_death() -> None:
    from sglang_rollout.engine.weight_sync.errors import WeightSyncError

    error = raised_in_actor(WeightSyncError(f"weight sync failed at /x; the learner's side: {GLOO}", ["http://e"]))
    with pytest.raises(WeightSyncError):
        asyncio.run(group_of((0.0, error), (0.0, 1)).values(BATCH))


def test_answers_are_those_of_rank_0() -> None:
    assert asyncio.run(group_of((0.01, "first"), (0.0, None)).values(BATCH)) == "first"


class FakePrompts:
    drawn = 0

    def state_dict(self) -> dict[str, int]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.drawn = state["drawn"]


@dataclass
class FakeRun:
    deaths_while_restarting: int = 0
    newest: Checkpoint | None = None  # the checkpointer's
    restarts: int = 0
    prompts: Any = field(default_factory=lambda: FakePrompts())
    rollout: Any = field(default_factory=lambda: SimpleNamespace(drop_paused=lambda: 0))
    config: Any = field(default_factory=lambda: load_config(None, ["trainer.max_learner_restarts=2"]))
    console: Console = field(default_factory=lambda: Console(record=True, quiet=False, width=300))

    async def restart_learner(self) -> None:
        self.restarts += 1
        if self.deaths_while_restarting:
            self.deaths_while_restarting -= 1
            raise LearnerDied("rank 1 died again")


def recover(recovery: LearnerRecovery) -> None:
    asyncio.run(recovery.after(LearnerDied("learner rank 0 on node7 died (x.log)")))


def test_restarts_are_bounded_until_there_is_a_new_checkpoint() -> None:
    run = FakeRun()
    recovery = LearnerRecovery(run, run)
    run.prompts.drawn = 8
    recover(recovery)
    recover(recovery)
    with pytest.raises(RuntimeError, match="died 3 times since the initial weights.*node7.*out of memory"):
        recover(recovery)
    assert run.restarts == 2
    run.newest = Checkpoint(Path("global_step_5"), 5)
    recover(recovery)
    assert run.restarts == 3 and run.prompts.drawn == 0
    assert "resumes from checkpoint global_step_5" in run.console.export_text()


def test_an_error_may_look_like_markup_of_the_console() -> None:
    run = FakeRun()
    asyncio.run(LearnerRecovery(run, run).after(LearnerDied(f"learner rank 0 lost its links: {GLOO}")))
    assert "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538]" in run.console.export_text()


def test_a_death_while_restarting_counts_too() -> None:
    run = FakeRun(deaths_while_restarting=1)
    recover(LearnerRecovery(run, run))
    assert run.restarts == 2
    run = FakeRun(deaths_while_restarting=9)
    with pytest.raises(RuntimeError, match="died 3 times.*at last: rank 1 died again"):
        recover(LearnerRecovery(run, run))
