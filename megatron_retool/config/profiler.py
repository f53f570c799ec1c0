"""Which steps are profiled, with which tool, on which ranks of the learner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.base import ConfigError, at_least_one, choice, number

LEARNER_PHASES = ("old_log_prob", "ref", "values", "update_critic", "update_actor", "weight_sync")
"""What the learner and the critic do in a step, by the names of metrics (timing_s/<phase>), in this order."""

SET_BY_US = ("o", "output", "capture-range", "c", "capture-range-end", "force-overwrite", "f")


@dataclass(frozen=True)
class ProfilerConfig:
    """What the learner's processes do within chosen steps."""

    tool: str = choice("none", "torch", "nsys")
    """torch: torch.profiler, a trace and a table for each step in the run's profile/. nsys: the ranks run under Nsight
    Systems, which records the steps with the phases as NVTX ranges. none: nothing is recorded, and nothing is paid."""
    steps: list[int] = number([], minimum=1)
    """Steps that are recorded, such as [5, 6]. The first one of a run loads and compiles, and is no typical one."""
    ranks: list[int] = number([0], minimum=0)
    """Ranks of the learner, and of a critic, that record; [] is all of them."""
    first_phase: str = choice(*LEARNER_PHASES)
    """The phase of a step that recording begins with."""
    last_phase: str = choice("weight_sync", *[name for name in LEARNER_PHASES if name != "weight_sync"])
    """The phase that it ends with."""
    record_shapes: bool = False
    """torch: the shapes of each operator's inputs."""
    with_memory: bool = False
    """torch: what each operator allocates and frees."""
    with_stack: bool = False
    """torch: the Python lines that each operator was called from; traces become several times larger."""
    top_operators: int = at_least_one(20)
    """torch: rows of the table of operators."""
    engines: bool = False
    """Also let SGLang record what its engines do in these steps, with its own profiler, into profile/engines/."""
    nsys_options: dict[str, Any] = field(
        default_factory=lambda: {"t": "cuda,nvtx,cublas", "cuda-memory-usage": "true", "kill": "none"}
    )
    """nsys: further options of `nsys profile`, without their dashes."""

    def records(self, rank: int) -> bool:
        """Whether ``rank`` is one of ``ranks``."""
        return not self.ranks or rank in self.ranks

    def check(self) -> None:
        """Raise ConfigError where settings of this section contradict each other."""
        if self.tool == "none":
            if self.engines and self.steps:
                raise ConfigError(
                    "trainer.profiler.engines=true needs trainer.profiler.tool=torch or nsys: engines are recorded in "
                    "the steps in which the learner is"
                )
            return
        if not self.steps:
            raise ConfigError(
                f"trainer.profiler.tool={self.tool} records the steps of trainer.profiler.steps, which names none: "
                "such as trainer.profiler.steps=[5]"
            )
        if LEARNER_PHASES.index(self.first_phase) > LEARNER_PHASES.index(self.last_phase):
            raise ConfigError(
                f"trainer.profiler.first_phase={self.first_phase} comes after last_phase={self.last_phase}: in a step "
                f"the phases are {', '.join(LEARNER_PHASES)}"
            )
        if taken := [name for name in self.nsys_options if name in SET_BY_US]:
            raise ConfigError(
                f"trainer.profiler.nsys_options: {taken[0]} is set by the run, whose steps and directory it follows"
            )
