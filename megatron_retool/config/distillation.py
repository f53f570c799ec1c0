"""Teachers of on-policy distillation."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_retool.config.base import ConfigError, at_least_one, not_negative, positive


@dataclass(frozen=True)
class TeacherConfig:
    url: str = ""
    """Base URL of an SGLang server with the teacher, such as http://teacher:30000."""
    data_sources: list[str] = field(default_factory=list)
    """Values of data_source whose rows it teaches; empty: all that no other teacher names."""
    api_key: str | None = None
    """Sent as a bearer token; take it from the environment: ${oc.env:TEACHER_API_KEY}."""


@dataclass(frozen=True)
class DistillationConfig:
    teachers: list[TeacherConfig] = field(default_factory=list)
    """Who scores the policy's own responses, in place of the initial policy as the reference: for
    algorithm.advantage=reverse_kl, kl_in_loss and kl_in_reward."""
    max_concurrent: int = at_least_one(64, maximum=4096)
    """Responses that one teacher scores at a time."""
    retries: int = not_negative(6)
    """After the first attempt, where a teacher does not answer or fails; the run ends with a message after them."""
    timeout_seconds: float = positive(600.0)
    """For scoring one response."""
    check_tokenizer: bool = True
    """Compare each teacher's tokenizer with the policy's before the first step; false for servers without one."""

    def check(self) -> None:
        """Raise ConfigError where a teacher has no address, or two of them would teach the same rows."""
        taught: dict[str, str] = {}
        for number, teacher in enumerate(self.teachers):
            key = f"algorithm.distillation.teachers[{number}]"
            if not teacher.url.startswith(("http://", "https://")):
                raise ConfigError(f"{key}.url={teacher.url!r}: expected http://… or https://…")
            for source in teacher.data_sources or [""]:
                if source in taught:
                    what = f"data_source {source!r}" if source else "the rows that no other teacher names"
                    raise ConfigError(f"{key}.data_sources: {taught[source]} teaches {what} already: name it once")
                taught[source] = key
