"""An agent whose responses wait as for a slow tool: for seconds with a long tail, without work for a processor."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from sglang_rollout.agent.loop import AgentLoop, AgentSetup
from sglang_rollout.agent.trajectory_state import TrajectoryState


class WaitingAgent(AgentLoop):
    """The ordinary turns with tools, after a wait that is the same for a response in every run.

    Args:
        median, sigma: of the log-normal distribution of the seconds.
        most: no wait is longer.
    """

    def __init__(self, setup: AgentSetup, *, median: float, sigma: float, most: float) -> None:
        super().__init__(setup)
        self.median, self.sigma, self.most = median, sigma, most

    async def run(self, state: TrajectoryState, generate: Any, paused: Any) -> bool:
        """See ``AgentLoop.run``."""
        draw = np.random.default_rng((state.group_id, state.index)).lognormal(np.log(self.median), self.sigma)
        await asyncio.sleep(min(float(draw), self.most))
        return await super().run(state, generate, paused)
