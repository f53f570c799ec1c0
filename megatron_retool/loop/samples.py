"""Validation samples for people: question, ground truth, what was answered, the verdict, and the whole response."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from megatron_retool.trajectory import FinishReason, Trajectory
from untrusted import printable

_INDENT = 4
_MARGIN = 2


@dataclass(frozen=True)
class LoggedSample:
    """
    Attributes:
        prediction: what the reward function read out of the response; None where it does not say.
        accuracy: 1 is right, 0 wrong.
        end: why the response ended, where it was not by itself.
        tools: the statuses of the tool calls, in order.
    """

    question: str
    truth: str
    prediction: str | None
    accuracy: float
    reward: float
    end: str | None
    turns: int
    tools: str
    response: str

    @property
    def verdict(self) -> str:
        """Right or wrong, or the accuracy where it is something between; then the reward."""
        words = {0.0: "wrong", 1.0: "right"}.get(self.accuracy, f"acc {self.accuracy:.3g}")
        end = f", ended by {self.end}" if self.end else ""
        return f"{words}{end}, reward {self.reward:+g}"

    def row(self) -> dict[str, str | float]:
        """A row of the loggers' tables."""
        return {
            "question": printable(self.question),
            "truth": printable(self.truth),
            "prediction": printable(self.prediction or ""),
            "correct": self.accuracy,
            "reward": self.reward,
            "turns": float(self.turns),
            "response": printable(self.response),
        }


def sample_of(trajectory: Trajectory, question: str, response: str) -> LoggedSample:
    """
    Args:
        trajectory: scored.
        response: the decoded response, special tokens included.
    """
    info = trajectory.reward_info
    prediction = info.get("pred")
    ended_by_itself = trajectory.finish_reason is FinishReason.STOP
    calls = ", ".join(f"{call.name} {call.status}" for call in trajectory.tool_calls)
    return LoggedSample(
        question=question,
        truth=str(trajectory.extra_info.get("ground_truth", "not in the data")),
        prediction=None if prediction is None else str(prediction),
        accuracy=trajectory.accuracy,
        reward=float(trajectory.reward),
        end=None if ended_by_itself else trajectory.finish_reason.value,
        turns=trajectory.num_turns,
        tools=calls or "none",
        response=response,
    )


def print_sample(console: Console, title: str, sample: LoggedSample) -> None:
    """A panel on a terminal, indented lines elsewhere; long lines are wrapped, and nothing is left out."""
    rows = [
        ("question", sample.question),
        ("ground truth", sample.truth),
        ("prediction", "none was found" if sample.prediction is None else sample.prediction),
        ("verdict", sample.verdict),
        ("tool calls", sample.tools),
        ("response", sample.response),
    ]
    inner = console.width - 2 * _MARGIN
    lines: list[Text] = []
    for name, value in rows:
        value = printable(value).strip("\n")
        if "\n" in value or len(name) + len(value) + 2 > inner:
            lines.append(Text(f"{name}:"))
            lines += [Text(" " * _INDENT).append_text(line) for line in Text(value).wrap(console, inner - _INDENT)]
        else:
            lines.append(Text(f"{name}: {value}"))
    if console.is_terminal:
        console.print(Panel(Group(*lines), title=Text(title), title_align="left", expand=False), soft_wrap=False)
    else:
        indented = "\n".join(f"{' ' * _MARGIN}{line.plain}".rstrip() for line in lines)
        console.print(Text(f"{title}\n{indented}\n"), soft_wrap=True)
