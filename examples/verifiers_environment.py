"""An environment of the package verifiers, which leads its rollouts itself: with its own prompts, tools and rewards.

rollout.agent: examples/verifiers_environment.py:run
rollout.agent_kwargs: {environment: my_sums, arguments: {size: 100}}
(scripts/setup.sh installs the package.)

A row of the data stands for an example of the environment, by its uid: the same one for a whole group, in every epoch.
"""

import contextlib
import functools
import json
import signal

import verifiers

from sglang_rollout.environments.base import row_number


async def run(task, client, *, environment, arguments=None):
    """The environment's reward, and its metrics."""
    world = loaded(environment, json.dumps(arguments or {}, sort_keys=True))
    rows = world.get_dataset() if task["purpose"] == "train" else world.get_eval_dataset()
    row = rows[row_number(task) % len(rows)]
    async with client.openai() as openai:
        state = await world.rollout(row, openai, client.model, dict(world.sampling_args))
        if state["error"] is not None:
            raise state["error"]
        await world.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
    return {**state["metrics"], "reward": state["reward"]}


@functools.cache
def loaded(environment, arguments):
    """One for all rollouts of the process. Each takes SIGINT and SIGTERM for itself, which are the run's."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return verifiers.load_environment(environment, **json.loads(arguments))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
