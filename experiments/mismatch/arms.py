"""What an experiment is: arms, each a set of overrides of the same demo, and overrides that several have in common."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CONFIGS = Path(__file__).parents[2] / "configs"
CONFIG = _CONFIGS / "demo_cpu.yaml"
MOE_CONFIG = _CONFIGS / "demo_moe_cpu.yaml"
TWO_TOOLS_CONFIG = _CONFIGS / "demo_two_tools_cpu.yaml"

REAL_MISMATCH = ("rollout.engine.dtype=bfloat16", "weight_sync.round_to=fp8")
"""The engine computes in bfloat16 with weights rounded to block-wise FP8 at every sync; the learner stays float32."""

CORRECTION = "algorithm.rollout_correction."

NO_CORRECTION = (f"{CORRECTION}mode=none", f"{CORRECTION}rejection=[]", f"{CORRECTION}veto_threshold=null")


def weights(level: str, mode: str, lower: float, upper: float) -> tuple[str, ...]:
    """Overrides that switch the importance weight on, after ``NO_CORRECTION``."""
    return (
        f"{CORRECTION}level={level}", f"{CORRECTION}mode={mode}", f"{CORRECTION}lower={lower}",
        f"{CORRECTION}upper={upper}",
    )  # fmt: skip


def rejection(*rules: str, veto: float | None = None) -> tuple[str, ...]:
    """Overrides that switch rejection on, after ``NO_CORRECTION``."""
    chosen = ",".join(f"'{rule}'" for rule in rules)
    return (f"{CORRECTION}rejection=[{chosen}]", *(() if veto is None else (f"{CORRECTION}veto_threshold={veto}",)))


TOKEN_TIS = weights("token", "truncate", 0, 2)
SEQUENCE_TIS = weights("sequence", "truncate", 0, 2)
TOKEN_MIS = weights("token", "mask", 0.5, 2)
SEQUENCE_MIS = weights("sequence", "mask", 0.5, 2)


@dataclass(frozen=True)
class Arm:
    """One line of a plot.

    Attributes:
        name: part of the run's directory.
        overrides: what is its own.
        quick: also part of the --quick form.
        against: the arm that it differs from in what it is about.
        starts_from: the arm whose checkpoint, halfway, it begins with; None: the fine-tuned model.
    """

    name: str
    overrides: tuple[str, ...]
    quick: bool = False
    against: str | None = None
    starts_from: str | None = None


@dataclass(frozen=True)
class Experiment:
    """
    Attributes:
        name: directory under the output and name in results.jsonl.
        title: of the plots.
        arms: what is compared; one that starts from another comes after it.
        common: overrides of every arm.
        config: the demo whose fine-tuned model every run starts from.
        steps: RL steps of each run.
        seeds: of the runs of each arm.
        evaluate_in_float32: at its end, a run's own weights answer the held-out problems in a float32 engine.
    """

    name: str
    title: str
    arms: tuple[Arm, ...]
    common: tuple[str, ...] = ()
    config: Path = CONFIG
    steps: int = 60
    seeds: tuple[int, ...] = (0, 1, 2)
    evaluate_in_float32: bool = False
