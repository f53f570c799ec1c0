"""`megatron-retool chat`: a conversation on the terminal, with the tools that the model calls and what they answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from megatron_retool.serving.front import serving_limits
from megatron_retool.serving.service import Service
from megatron_retool.serving.source import context_length
from megatron_retool.serving.tool_turns import Finished, until_final
from megatron_retool.trajectory import ToolCall
from sglang_rollout.agent.trajectory_state import TrajectoryState, joined
from sglang_rollout.engine.base import GenerateResult
from sglang_rollout.gateway.conversation import ConversationAnswer, ConversationCall, Message, SpokenCall
from sglang_rollout.gateway.errors import ApiError
from sglang_rollout.gateway.interface import GatewayStatistics, Sampler, TurnRequest
from sglang_rollout.gateway.sessions import OpenSession, session_settings
from tools.tool import ToolSession, TrajectoryInfo
from untrusted import printable

PIECE_TOKENS = 16
"""Of an answer that is shown while it is sampled."""
HELP = "/reset starts over, /quit ends; Ctrl-C stops an answer, and ends at the question mark"


class PiecewiseSampler:
    """Samples a turn in pieces, each of which continues the ids of those before, so that somebody can read along.

    Seeds and log-probs are those of a turn that is sampled at once. A turn that may end at a text is: the text could
    lie across two pieces.

    Args:
        sampler: of the pieces.
        show: called after each piece with the turn's ids so far.
    """

    def __init__(self, sampler: Sampler, show: Callable[[list[int]], None]) -> None:
        self._sampler = sampler
        self._show = show

    async def generate(self, state: TrajectoryState, request: TurnRequest) -> GenerateResult:
        """See ``interface.Sampler``."""
        if request.stop.strings:
            return await self._sampler.generate(state, request)
        work, sampled = state.copy(), None
        while True:
            room = request.max_new_tokens - (0 if sampled is None else len(sampled.output_ids))
            piece = await self._sampler.generate(
                work, TurnRequest(min(PIECE_TOKENS, room), request.sampling, request.stop, request.deadline_seconds)
            )
            work.append_sampled(piece)
            sampled = joined(sampled, piece)
            self._show(sampled.output_ids)
            if piece.finish_reason != "length" or len(piece.output_ids) >= room:
                state.seconds, state.timing = work.seconds, work.timing
                return sampled


class Chat:
    """One conversation.

    Args:
        service: entered; its tools are the model's, where it has some.
        answers: gets the text of answers.
        notes: gets what happens on the way to them: tool calls, results, errors.
        system: the first message.
        seed: of the draws; None: they differ every time.
    """

    def __init__(
        self,
        service: Service,
        answers: Console,
        notes: Console,
        *,
        system: str | None = None,
        seed: int | None = None,
    ) -> None:
        self._service = service
        self._answers, self._notes = answers, notes
        self._system, self._seed = system, seed
        self._length = context_length(service.config.rollout, service.config.model)
        self._sampler = PiecewiseSampler(service.sampler, self._read_along)
        self._so_far = ""
        self._tools: ToolSession | None = None
        self._number = 0

    async def __aenter__(self) -> Chat:
        await self.reset()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._close_tools()

    async def reset(self) -> None:
        """Forget what was said, also by tools that remember."""
        await self._close_tools()
        service = self._service
        schemas = None if service.tools is None else service.tools.schemas()
        settings = session_settings(
            service.config.rollout.val, schemas, serving_limits(self._length), self._seed, self._number, 0
        )
        self._session = OpenSession(
            settings, service.renderer, self._sampler, GatewayStatistics(), "", lambda session: None
        )
        self._history: list[Message] = []
        if self._system is not None:
            self._history.append({"role": "system", "content": self._system})
        if service.tools is not None:
            self._tools = await service.tools.open(TrajectoryInfo(self._number, 0))
        self._number += 1

    async def ask(self, question: str) -> ConversationAnswer | None:
        """Answer ``question`` on the consoles; None: it could not be answered, which is said."""
        history = [*self._history, {"role": "user", "content": question}]
        try:
            finished = await self._finished(history)
        except ApiError as error:
            self._note(f"no answer: {error}", "red")
            return None
        answer = finished.answers[-1]
        self._history = [*history, *finished.turns, answer.message()]
        if finished.at_limit:
            self._note("the model wanted more turns or tool calls than rollout.multi_turn allows", "yellow")
        elif answer.finish_reason == "length":
            self._note(f"the answer is cut: the context has {self._length} tokens", "yellow")
        return answer

    async def talk(self, lines: Lines) -> None:
        """Answer line after line until /quit or the end of the input."""
        self._note(HELP, "dim")
        while True:
            self._answers.print("[bold green]?[/] ", end="")
            line = await lines.next()
            question = (line or "").strip()
            if line is None or question == "/quit":
                return
            if question == "/reset":
                await self.reset()
                self._note("started over", "dim")
            elif question.startswith("/") and len(question.split()) == 1:
                self._note(HELP, "dim")
            elif question:
                await self._stoppable(question)

    async def _stoppable(self, question: str) -> None:
        """Answer; Ctrl-C ends only the answer, and its question is then forgotten."""
        task = asyncio.ensure_future(self.ask(question))
        with _sigint(task):
            await asyncio.wait({task})
        if task.cancelled():
            self._note("stopped; the question is forgotten", "yellow")
        else:
            task.result()

    async def _finished(self, history: list[Message]) -> Finished:
        async def ask(messages: list[Message]) -> ConversationAnswer:
            with self._shown():
                (answer,) = await self._session.answer(ConversationCall(messages))
            return answer

        return await until_final(ask, self._tools, self._service.config.rollout.multi_turn, history, self)

    def said(self, answer: ConversationAnswer) -> None:
        """Shows a turn, and what it calls."""
        console = self._notes if answer.calls else self._answers
        if answer.content.strip():
            console.print(Text(printable(answer.content.strip())))
        for call in answer.calls:
            self._notes.print(Panel(_shown_call(call), title=f"calls {printable(call.name)}", title_align="left"))

    def ran(self, call: SpokenCall, record: ToolCall, text: str) -> None:
        """Shows what a tool has answered."""
        style = "green" if record.status == "ok" else "red"
        title = f"{printable(record.name)}: {record.status}, {record.seconds:.2f} s"
        shown = Text(printable(text.strip()) or "(nothing)")
        self._notes.print(Panel(shown, title=title, title_align="left", border_style=style))

    @contextlib.contextmanager
    def _shown(self) -> Iterator[None]:
        """While a turn is sampled, its text so far, on a terminal."""
        if not self._notes.is_terminal:
            yield
            return

        def end_of_text() -> Text:
            room = max(4, self._notes.height - 4)
            lines = Text(self._so_far, style="dim").wrap(self._notes, self._notes.width)
            return Text("\n").join(lines[-room:])

        self._so_far = "…"
        with Live(get_renderable=end_of_text, console=self._notes, transient=True, refresh_per_second=8):
            yield

    def _read_along(self, ids: list[int]) -> None:
        if self._notes.is_terminal:
            self._so_far = printable(self._service.tokenizer.decode(ids, skip_special_tokens=True))

    async def _close_tools(self) -> None:
        if self._tools is not None:
            await self._tools.close({})
            self._tools = None

    def _note(self, text: str, style: str) -> None:
        self._notes.print(Text(text, style=style))


class Lines:
    """Lines of standard input, read by a thread that the program's end does not wait for."""

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._loop = asyncio.get_running_loop()
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        threading.Thread(target=self._read, name="input", daemon=True).start()

    async def next(self) -> str | None:
        """The next line without its end; None at the end of the input."""
        return await self._lines.get()

    def _read(self) -> None:
        rest = b""
        while True:
            try:
                # Not sys.stdin, whose lock would be missed at the end of the process.
                read = os.read(self._descriptor, 1 << 16)
            except OSError:
                read = b""
            *lines, rest = (rest + read).split(b"\n")
            result: list[str | None] = [line.decode(errors="replace") for line in lines]
            if not read:
                result += [rest.decode(errors="replace")] if rest else []
                result.append(None)
            for line in result:
                with contextlib.suppress(RuntimeError):  # the loop has ended
                    self._loop.call_soon_threadsafe(self._lines.put_nowait, line)
            if not read:
                return


@contextlib.contextmanager
def _sigint(task: asyncio.Future[Any]) -> Iterator[None]:
    """For the length of the block, Ctrl-C cancels ``task``."""
    loop = asyncio.get_running_loop()
    previous = signal.signal(signal.SIGINT, lambda number, frame: loop.call_soon_threadsafe(task.cancel))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _shown_call(call: SpokenCall) -> RenderableType:
    """The code of a call that has code, else its arguments."""
    if call.error is not None:
        return Group(Text(printable(call.arguments)), Text(printable(call.error), style="red"))
    arguments = json.loads(call.arguments)
    if list(arguments) == ["code"] and isinstance(arguments["code"], str):
        return Syntax(printable(arguments["code"].strip()), "python", theme="ansi_dark", word_wrap=True)
    return Text(printable(json.dumps(arguments, indent=1, ensure_ascii=False)))
