"""What can be said against a run's own functions and classes before any process is started for it."""

from __future__ import annotations

from megatron_retool.config import Config
from megatron_retool.monitor.loggers import check_loggers
from megatron_retool.rewards.manager import check_reward
from sglang_rollout.agent.agents import check_agent
from sglang_rollout.agent.tool_call_formats import check_format
from sglang_rollout.engine.base import check_engine
from tools.registry import check_tools


def check_extensions(config: Config) -> None:
    """Load what the configuration names (docs/extending.md), and try on made-up input what can be tried.

    What needs the tokenizer or the data is checked when they are there: agents, and the reward function once more on
    the first prompt.

    Raises:
        ConfigError, ExtensionError: one cannot be imported, has a wrong signature, raises, or returns what is of no
            use. The message names the key, the object and the cure.
    """
    check_loggers(config.trainer)
    config.algorithm.dry_run()
    check_reward(config.reward)
    check_tools(config)
    check_format(config)
    check_agent(config)
    check_engine(config)
