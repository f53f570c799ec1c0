"""The server of the Tinker protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import ConfigError, at_least_one, choice, positive


@dataclass(frozen=True)
class TinkerConfig:
    """The server of the Tinker protocol."""

    names: list[str] = field(default_factory=list)
    """Names by which clients may call the model, beside that of its directory. The cookbook's recipes know only
    published names, such as Qwen/Qwen3-8B."""
    api_key: str | None = None
    """What every call must show; it begins with tml-, as clients demand. null: any key on loopback, elsewhere one that
    is made and printed."""
    alpha: float = positive(32.0)
    """Of every run's adapter, which is scaled by alpha / rank; the learning rates of Tinker's recipes go with 32."""
    stable_reinforce: str = choice("refuse", "stand_in")
    """The recipes' default loss, whose formula is not published. refuse: an error that names another loss. stand_in: a
    clipped REINFORCE in its place, whose ratios are cut at 1.2."""
    max_runs: int = at_least_one(16, maximum=4096)
    """Training runs that are open at a time; each one's adapter, gradients and optimizer state lie in host memory."""
    loaded_adapters: int = at_least_one(8, maximum=4096)
    """Snapshots that the engines hold at a time; others are read from disk when they are used."""
    unnamed_samplers: int = at_least_one(16)
    """Snapshots without a name that are kept of each run, the newest ones. A loop of reinforcement learning makes one
    a step."""
    session_timeout_seconds: float = positive(3600.0)
    """Without a sign of life from its client, after which a session ends and its runs are closed. Checkpoints stay."""
    share_seconds: float = positive(20.0)
    """How long a run keeps the learner while others wait."""

    def check(self) -> None:
        """Raise ConfigError where clients would refuse a name or the key."""
        if self.api_key is not None and not self.api_key.startswith("tml-"):
            raise ConfigError("tinker.api_key does not begin with tml-: clients of Tinker refuse to send other keys")
        if any(not name.strip() for name in self.names):
            raise ConfigError("tinker.names has an empty name: leave it out")
