"""Teachers of on-policy distillation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_retool.config.base import ConfigError, at_least_one, choice, fraction, not_negative, positive

if TYPE_CHECKING:
    from conversion.model.architecture import Architecture
    from megatron_retool.config.learner import LearnerConfig


@dataclass(frozen=True)
class TeacherConfig:
    """Where one teacher is, and which rows it teaches."""

    url: str = ""
    """Base URL of an SGLang server with the teacher, such as http://teacher:30000."""
    data_sources: list[str] = field(default_factory=list)
    """Values of data_source whose rows it teaches; empty: all that no other teacher names."""
    api_key: str | None = None
    """Sent as a bearer token; take it from the environment: ${oc.env:TEACHER_API_KEY}."""
    path: str = ""
    """In place of url: Hugging Face directory of a model that the learner computes itself, frozen, in the policy's
    layout. It can teach by divergence."""


@dataclass(frozen=True)
class DistillationConfig:
    """Teachers, how they are asked, and the divergence from them in the loss."""

    teachers: list[TeacherConfig] = field(default_factory=list)
    """Who scores the policy's own responses, in place of the initial policy as the reference: for
    algorithm.advantage=reverse_kl, kl_in_loss and kl_in_reward."""
    divergence: str = choice("none", "forward_kl", "reverse_kl", "jensen_shannon")
    """A term of the loss beside the policy's: how far the policy's distribution is from the teacher's at each sampled
    token, over the whole vocabulary. forward_kl: KL(teacher | policy); reverse_kl: KL(policy | teacher);
    jensen_shannon: both to their mixture. Teachers have a path."""
    divergence_weight: float = positive(1.0)
    """Its coefficient in the loss."""
    beta: float = fraction(0.5)
    """jensen_shannon: the teacher's share of the mixture; above 0 and below 1."""
    top_k: int = not_negative(0)
    """Compare only the teacher's k most probable tokens, and all others as one; 0: every token of the vocabulary."""
    max_concurrent: int = at_least_one(64, maximum=4096)
    """Responses that one teacher scores at a time."""
    retries: int = not_negative(6)
    """After the first attempt, where a teacher does not answer or fails; the run ends with a message after them."""
    timeout_seconds: float = positive(600.0)
    """For scoring one response."""
    check_tokenizer: bool = True
    """Compare each teacher's tokenizer with the policy's before the first step; false for servers without one."""

    @property
    def paths(self) -> list[str]:
        """Directories of the teachers that the learner computes; empty where teachers are servers."""
        return [teacher.path for teacher in self.teachers if teacher.path]

    @property
    def served(self) -> bool:
        """Whether teachers are servers."""
        return bool(self.teachers) and not self.paths

    def teacher_of(self, data_source: str) -> int:
        """Number of the teacher of rows with this data_source.

        Raises:
            ConfigError: there is none.
        """
        named = {source: number for number, each in enumerate(self.teachers) for source in each.data_sources or [""]}
        number = named.get(data_source, named.get(""))
        if number is None:
            raise ConfigError(
                f"algorithm.distillation.teachers: no teacher names the data source {data_source!r}: add it to one's "
                "data_sources, or leave one's empty"
            )
        return number

    def teacher_architectures(
        self, policy: Architecture, learner: LearnerConfig, families: Sequence[str] = ()
    ) -> list[Architecture]:
        """The architectures of the teachers that have a path, once learner and policy can have them as teachers.

        Args:
            families: model.families.

        Raises:
            ConfigError: there is no such directory, its vocabulary is another one than the policy's, or the layout
                does not divide it.
            UnsupportedArchitecture: see ``Architecture.from_pretrained``.
        """
        return [self._architecture(number, policy, learner, families) for number in range(len(self.paths))]

    def _architecture(
        self, number: int, policy: Architecture, learner: LearnerConfig, families: Sequence[str]
    ) -> Architecture:
        from conversion.model.architecture import Architecture

        path = self.paths[number]
        key = f"algorithm.distillation.teachers[{number}].path={path}"
        if not Path(path).is_dir():
            raise ConfigError(f"{key} is no directory: give that of a Hugging Face model")
        teacher = Architecture.from_pretrained(path, families)
        if teacher.vocab_size != policy.vocab_size:
            raise ConfigError(
                f"{key}: its vocabulary has {teacher.vocab_size} rows and the policy's has {policy.vocab_size}: take "
                "a teacher with the policy's vocabulary, or serve it with SGLang and give its url"
            )
        frozen = dataclasses.replace(learner, lora=type(learner.lora)(), mtp=type(learner.mtp)())
        try:
            frozen.layout(teacher)
        except ConfigError as error:
            raise ConfigError(f"{key}: the learner computes it in the policy's layout: {error}") from error
        return dataclasses.replace(teacher, predictors=0)

    def _check_divergence(self) -> None:
        key = "algorithm.distillation"
        if self.paths:
            if len(self.paths) < len(self.teachers):
                raise ConfigError(
                    f"{key}.teachers: some have a path and some have none: the learner computes all of them, or serve "
                    "all with SGLang and give their urls"
                )
            for number, teacher in enumerate(self.teachers):
                if teacher.url or teacher.api_key:
                    raise ConfigError(
                        f"{key}.teachers[{number}].path={teacher.path} is computed by the learner: leave out its url "
                        "and api_key"
                    )
        elif self.divergence != "none":
            raise ConfigError(
                f"{key}.divergence={self.divergence} compares whole distributions, which the learner has only of a "
                f"teacher that it computes: give {key}.teachers[0].path"
            )
        if self.divergence == "jensen_shannon" and not 0 < self.beta < 1:
            raise ConfigError(
                f"{key}.beta={self.beta} makes the mixture one of the two distributions: choose one above 0 and below "
                f"1, or {key}.divergence=forward_kl or reverse_kl"
            )

    def check(self) -> None:
        """Raise ConfigError where a teacher has no address, two of them would teach the same rows, or the divergence
        cannot be computed."""
        self._check_divergence()
        taught: dict[str, str] = {}
        for number, teacher in enumerate(self.teachers):
            key = f"algorithm.distillation.teachers[{number}]"
            if not teacher.path and not teacher.url.startswith(("http://", "https://")):
                raise ConfigError(f"{key}.url={teacher.url!r}: expected http://… or https://…")
            for source in teacher.data_sources or [""]:
                if source in taught:
                    what = f"data_source {source!r}" if source else "the rows that no other teacher names"
                    raise ConfigError(f"{key}.data_sources: {taught[source]} teaches {what} already: name it once")
                taught[source] = key
