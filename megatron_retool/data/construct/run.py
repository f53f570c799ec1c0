"""Asks for every trace that has no verdict yet, several at a time, and writes what was accepted."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from code_interpreter.client import SandboxUnavailable
from megatron_retool.chat_endpoint import ChatEndpoint, EndpointRefusal, EndpointSilence
from megatron_retool.data.construct.judge import RewriteVerdict, Run, judge
from megatron_retool.data.construct.ledger import Ledger, key_of
from megatron_retool.data.files import DataError
from megatron_retool.data.prepare.batches import RowFile
from megatron_retool.data.prepare.layouts import CONVERSATIONS
from megatron_retool.data.prompt_files import question_messages
from megatron_retool.runs.progress import ProgressLine, progress_line
from run_files.atomic_files import atomic_write, write_text
from run_files.parquet_files import write_row_groups
from tools.code_interpreter_tool import CodeInterpreterTool

_QUESTION, _REASONING = "<<question>>", "<<reasoning>>"
_GROUP_ROWS = 256
_MOST_FAILURES = 8
"""In a row, beside the requests under way, before the endpoint or the sandbox counts as gone."""


@dataclass(frozen=True)
class PlainTrace:
    """A question that was answered without code."""

    row: int
    question: str
    reasoning: str
    answer: str


@dataclass(frozen=True)
class Columns:
    """Names of the input's columns."""

    question: str = "question"
    reasoning: str = "reasoning"
    answer: str = "answer"


class PromptTemplate:
    """What is asked of the model: a text with the places <<question>> and <<reasoning>>.

    Raises:
        DataError: the file cannot be read, or lacks a place.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompt {path}: {error}") from error
        for place in (_QUESTION, _REASONING):
            if place not in self.text:
                raise DataError(f"--prompt {path}: there is no {place} in it, where each trace's text goes")

    def fill(self, trace: PlainTrace) -> str:
        """The request with the trace's question and reasoning in their places."""
        # At once: a question may hold the other's place.
        first, second = self.text.split(_QUESTION, 1)
        parts = [part.replace(_REASONING, trace.reasoning) for part in (first, second)]
        return trace.question.join(parts)


def read_traces(path: Path, columns: Columns, limit: int | None = None) -> Iterator[PlainTrace]:
    """The traces of a parquet or JSON file, read as they are asked for.

    Raises:
        DataError: a column is missing or a cell empty, naming file, row and column.
    """
    file = RowFile(path, str(path))
    names = [columns.question, columns.reasoning, columns.answer]
    for name in names:
        if name not in file.columns:
            raise DataError(
                f"{path}: column {name!r} is missing; the file has {', '.join(file.columns)}: name the columns with "
                "--question, --reasoning and --answer"
            )
    for batch in file.batches(names):
        for row, cells in enumerate(batch.rows.to_pylist(), batch.first):
            if limit is not None and row >= limit:
                return
            texts = []
            for name in names:
                text = "" if cells[name] is None else str(cells[name]).strip()
                if not text:
                    raise DataError(f"{path}, row {row}, column {name!r}: the cell is empty")
                texts.append(text)
            yield PlainTrace(row, *texts)


class Construction:
    """The work of one command.

    Args:
        traces: the input's path, columns and limit.
        directory: of ledger.jsonl, train.parquet, rejected.jsonl and manifest.json.
        endpoint: open.
        run: from code to its output.
        settings: what else decides about a reply; traces that were asked under others are asked again.
    """

    def __init__(
        self,
        traces: tuple[Path, Columns, int | None],
        directory: Path,
        template: PromptTemplate,
        endpoint: ChatEndpoint,
        run: Run,
        *,
        instruction: str,
        settings: dict[str, Any],
        retry_rejected: bool = False,
    ) -> None:
        self._traces, self._directory = traces, directory
        self._template, self._endpoint, self._run = template, endpoint, run
        self._instruction = instruction
        self._settings = {"model": endpoint.model, "prompt": template.text, "instruction": instruction, **settings}
        directory.mkdir(parents=True, exist_ok=True)
        self._ledger = Ledger(directory / "ledger.jsonl")
        self._keys: list[str] = []
        self._failures = 0
        self._accepted = 0
        self._asked = 0
        if retry_rejected:
            self._ledger.forget_rejected()

    async def work(self, concurrency: int, console: Console) -> Counter[str]:
        """Ask for what is missing, then write the files.

        Returns:
            Counts: "traces", "accepted", "calls", "replaced", "rejected: REASON", and "unanswered", those that neither
            endpoint nor sandbox answered, and that the same command asks again.

        Raises:
            DataError: the input is wrong.
            EndpointError: no request will be answered.
            EndpointSilence, SandboxUnavailable: none was for long. What is in the ledger stays.
        """
        self._keys = list(dict.fromkeys(self._key(trace) for trace in read_traces(*self._traces)))
        total = len(self._keys)
        missing = total - sum(key in self._ledger for key in self._keys)
        if total > missing:
            console.print(f"{total - missing} of {total} traces have a verdict from before", highlight=False)
        with progress_line(console, "traces", missing) as line:
            pending = self._pending()
            workers = [asyncio.create_task(self._worker(pending, line, concurrency)) for _ in range(concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        return self._write()

    def _key(self, trace: PlainTrace) -> str:
        return key_of(self._settings, trace.question, trace.reasoning, trace.answer)

    def _pending(self) -> Iterator[tuple[str, PlainTrace]]:
        taken = set()
        for trace in read_traces(*self._traces):
            key = self._key(trace)
            if key not in self._ledger and key not in taken:
                taken.add(key)
                yield key, trace

    async def _worker(self, pending: Iterator[tuple[str, PlainTrace]], line: ProgressLine, concurrency: int) -> None:
        for key, trace in pending:
            try:
                record = await self._settle(trace)
            except (EndpointSilence, SandboxUnavailable):
                self._failures += 1
                # Where nothing ever worked, the settings are wrong.
                if not self._asked or self._failures >= _MOST_FAILURES + concurrency:
                    raise
                continue
            self._failures = 0
            self._asked += 1
            self._ledger.append(key, record)
            self._accepted += record["reason"] is None
            line.note(f"{self._accepted} accepted")
            line.advance()

    async def _settle(self, trace: PlainTrace) -> dict[str, Any]:
        prompt = question_messages(trace.question, self._instruction)
        reply = None
        try:
            reply = await self._endpoint.ask(self._template.fill(trace))
        except EndpointRefusal as error:
            verdict = RewriteVerdict("refused by the endpoint", str(error))
        else:
            verdict = await judge(reply, prompt, trace.answer, self._run)
        record = {"row": trace.row, "reason": verdict.reason, "calls": verdict.calls, "replaced": verdict.replaced}
        if verdict.reason is None:
            return {**record, "messages": verdict.messages}
        question = {"question": trace.question, "answer": trace.answer}
        return {**record, "detail": verdict.detail, **question, "reply": None if reply is None else reply.text}

    def _write(self) -> Counter[str]:
        counts = self._ledger.counts(self._keys)
        settled = sum(key in self._ledger for key in self._keys)
        counts.update(traces=len(self._keys), unanswered=len(self._keys) - settled)
        if counts["accepted"]:
            with atomic_write(self._directory / "train.parquet") as handle:
                write_row_groups(handle, CONVERSATIONS, self._pieces())
        with atomic_write(self._directory / "rejected.jsonl") as handle:
            for record in self._ledger.records(self._keys, accepted=False):
                handle.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        path, columns, limit = self._traces
        manifest = {
            "input": str(path),
            "columns": vars(columns),
            "limit": limit,
            **self._settings,
            "counts": dict(sorted(counts.items())),
        }
        text = json.dumps(manifest, indent=2, ensure_ascii=False, default=str)
        write_text(self._directory / "manifest.json", text + "\n")
        return counts

    def _pieces(self) -> Iterator[dict[str, list[Any]]]:
        tools = json.dumps([CodeInterpreterTool.schema])
        records = self._ledger.records(self._keys, accepted=True)
        while rows := list(itertools.islice(records, _GROUP_ROWS)):
            yield _columns(rows, tools)


def _columns(rows: list[dict[str, Any]], tools: str) -> dict[str, list[Any]]:
    return {
        "messages": [json.dumps(row["messages"]) for row in rows],
        "tools": [tools] * len(rows),
        "extra_info": pa.array([{"index": row["row"], "tool_calls": row["calls"]} for row in rows],
                               CONVERSATIONS.field("extra_info").type),
    }  # fmt: skip
