"""How a profiled step is told: the share of its phases and, of each rank, the operators that took longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from run_files.phases import Phase

_SHOWN_ON_CONSOLE = 5


@dataclass(frozen=True)
class OperatorTime:
    """An operator's own time in a step, without that of the operators it calls; in microseconds."""

    name: str
    calls: int
    cpu_us: float
    device_us: float = 0.0


@dataclass(frozen=True)
class RankProfile:
    """What one rank recorded in one step.

    Attributes:
        rank: with its role, such as "learner rank 0".
        trace: file below the run's profile/; "" where none was written.
        phases: seconds of the rank's phases by name, in their order.
        operators: empty where the tool tells none.
        problem: why there is no trace.
    """

    rank: str
    trace: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    operators: Sequence[OperatorTime] = ()
    problem: str = ""

    def top(self, count: int) -> tuple[str, list[OperatorTime]]:
        """The device whose time counts (CUDA where there is any, else CPU), and the operators with most of it."""
        on_device = any(each.device_us > 0 for each in self.operators)
        ranked = sorted(self.operators, key=lambda each: each.device_us if on_device else each.cpu_us, reverse=True)
        return ("CUDA" if on_device else "CPU"), ranked[:count]


def profile_page(step: int, seconds: Mapping[Phase, float], ranks: Sequence[RankProfile], top: int) -> str:
    """The profile of a step as Markdown.

    Args:
        seconds: of the phases of the whole step, in which Phase.STEP is the sum.
        top: rows of each table of operators.
    """
    lines = [f"# Step {step}", ""]
    whole = seconds.get(Phase.STEP, 0.0)
    lines += [f"Phases of the step, of {whole:.3f} s together:", "", "| phase | s | share |", "|---|---:|---:|"]
    for phase, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        if phase is not Phase.STEP:
            lines.append(f"| {phase} | {taken:.3f} | {_share(taken, whole)} |")
    for profile in ranks:
        lines += ["", f"## {profile.rank}", ""]
        lines.append(f"Trace: `{profile.trace}`" if profile.trace else f"No trace: {profile.problem}")
        recorded = sum(profile.phases.values())
        lines += ["", "| phase | s | share of what was recorded |", "|---|---:|---:|"]
        lines += [f"| {name} | {taken:.3f} | {_share(taken, recorded)} |" for name, taken in profile.phases.items()]
        if not profile.operators:
            continue
        device, operators = profile.top(top)
        clocks = [("CPU", "cpu_us")] + ([("CUDA", "device_us")] if device == "CUDA" else [])
        totals = {name: sum(getattr(each, name) for each in profile.operators) for _, name in clocks}
        lines += ["", f"Operators by their own {device} time:", ""]
        lines.append("| operator | calls |" + "".join(f" {clock} ms | of all |" for clock, _ in clocks))
        lines.append("|---|---:|" + "---:|---:|" * len(clocks))
        for each in operators:
            times = ((getattr(each, name), totals[name]) for _, name in clocks)
            cells = "".join(f" {taken / 1e3:.3f} | {_share(taken, whole)} |" for taken, whole in times)
            lines.append(f"| `{each.name.replace('|', '/')}` | {each.calls} |{cells}")
    return "\n".join(lines) + "\n"


def short_table(step: int, ranks: Sequence[RankProfile]) -> Table:
    """The same in a few rows, for the console."""
    table = Table(title=f"profile of step {step}")
    for name in ("rank", "phases", "longest operators"):
        table.add_column(name, overflow="fold")
    for profile in ranks:
        recorded = sum(profile.phases.values())
        phases = "\n".join(f"{name} {taken:.2f} s {_share(taken, recorded)}" for name, taken in profile.phases.items())
        device, operators = profile.top(_SHOWN_ON_CONSOLE)
        times = [(each.name, each.device_us if device == "CUDA" else each.cpu_us) for each in operators]
        longest = "\n".join(f"{name} {taken / 1e3:.1f} ms {device}" for name, taken in times)
        table.add_row(profile.rank, phases, longest or profile.problem or profile.trace)
    return table


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else ""
