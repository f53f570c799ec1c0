"""ReTool's cold start: plain reasoning becomes reasoning with code that has run, as data for fine-tuning.

A model behind any OpenAI-compatible endpoint rewrites each trace. Its code is run in
the sandbox, the outputs that it made up are replaced by the real ones, and what
breaks the format or misses the answer is rejected, with the reason. DIR gets
train.parquet, rejected.jsonl, manifest.json and ledger.jsonl, from which the same
command continues: what has a verdict is not asked again. docs/data.md has the rest.

examples:
  megatron-retool data construct --input traces.jsonl --output data/cold_start \\
      --url http://localhost:30000/v1 --model Qwen2.5-72B-Instruct
  megatron-retool data construct --input traces.parquet --output data/cold_start \\
      --url https://api.example.com/v1 --model big --key-variable EXAMPLE_KEY \\
      tools.code_interpreter.workers=8
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_retool.commands.settings import at_least, endpoint_key
from megatron_retool.errors import InputError
from megatron_retool.installation import shipped

if TYPE_CHECKING:
    from megatron_retool.config import DataConfig, ToolsConfig
    from megatron_retool.data.construct.run import PromptTemplate

SETTINGS = ("tools.code_interpreter",)
EXIT_STATUS = {1: "an error, which the last line says, or traces without an answer: the same command asks them again"}
PROMPT = shipped("configs/data_construct_prompt.txt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what ``data construct`` takes on the command line."""
    parser.add_argument("--input", metavar="FILE", type=Path, required=True, help="parquet, JSON Lines or JSON")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True)
    endpoint = parser.add_argument_group("the model that rewrites")
    endpoint.add_argument("--url", required=True, help="base of the API, such as http://localhost:30000/v1")
    endpoint.add_argument("--model", required=True, help="as the endpoint knows it")
    endpoint.add_argument(
        "--key-variable", metavar="NAME", help="environment variable that holds the key (default: no key is sent)"
    )
    endpoint.add_argument("--prompt", metavar="FILE", type=Path, default=PROMPT,
                          help="what it is asked (default: configs/data_construct_prompt.txt)")  # fmt: skip
    endpoint.add_argument("--temperature", type=float, default=0.6, help="(default: 0.6)")
    endpoint.add_argument("--max-tokens", metavar="N", type=at_least(1), default=16384, help="(default: 16384)")
    endpoint.add_argument("--concurrency", metavar="N", type=at_least(1), default=16, help="requests (default: 16)")
    endpoint.add_argument("--retries", metavar="N", type=at_least(0), default=6, help="of a request (default: 6)")
    endpoint.add_argument("--timeout", metavar="SECONDS", type=float, default=600.0, help="(default: 600)")
    traces = parser.add_argument_group("the traces")
    traces.add_argument("--question", metavar="COLUMN", default="question", help="(default: question)")
    traces.add_argument("--reasoning", metavar="COLUMN", default="reasoning", help="(default: reasoning)")
    traces.add_argument("--answer", metavar="COLUMN", default="answer", help="the ground truth (default: answer)")
    traces.add_argument("--limit", metavar="N", type=at_least(1), help="only the first N rows")
    traces.add_argument("--retry-rejected", action="store_true", help="ask again for what was rejected")
    traces.add_argument(
        "--instruction", metavar="TEXT", help="below the question in the rows (default: data.question_instruction)"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file whose tools.code_interpreter holds (default: none)")
    parser.add_argument("overrides", nargs="*", metavar="dotted.key=value", help="settings in place of the file's")


def run(options: argparse.Namespace, console: Console) -> int:
    """Carry out ``data construct``; the exit status."""
    from megatron_retool.commands.running import run_async
    from megatron_retool.config import load_config
    from megatron_retool.data.construct.run import PromptTemplate
    from megatron_retool.data.construct.summary import show

    config = load_config(options.config, options.overrides)
    template = PromptTemplate(options.prompt)
    key = endpoint_key(options.url, options.key_variable)
    if options.timeout <= 0 or options.temperature < 0:
        raise InputError("--timeout must be positive, and --temperature not negative")
    counts = run_async(_construct(options, config.tools, config.data, template, key, console))
    show(counts, options.output, console)
    return 1 if counts["unanswered"] else 0


async def _construct(
    options: argparse.Namespace,
    tools: ToolsConfig,
    data: DataConfig,
    template: PromptTemplate,
    key: str | None,
    console: Console,
) -> Counter[str]:
    from contextlib import AsyncExitStack

    from code_interpreter.client import CodeInterpreterClient
    from code_interpreter.process import SandboxServerProcess
    from megatron_retool.chat_endpoint import ChatEndpoint
    from megatron_retool.data.construct.judge import runner
    from megatron_retool.data.construct.run import Columns, Construction, read_traces

    traces = (options.input, Columns(options.question, options.reasoning, options.answer), options.limit)
    for _ in read_traces(*traces):  # a fault in any row is found before anything is started
        pass
    interpreter = tools.code_interpreter
    instruction = data.question_instruction if options.instruction is None else options.instruction
    sampling = {"temperature": options.temperature, "max_tokens": options.max_tokens}
    async with AsyncExitStack() as stack:
        urls = interpreter.urls
        if not urls:
            server = SandboxServerProcess(interpreter, port=interpreter.port)
            urls = [server.start()]
            stack.callback(server.stop)
        client = await stack.enter_async_context(CodeInterpreterClient(urls))
        silent = await client.silent_servers()
        if silent:
            raise InputError(f"tools.code_interpreter.url: {silent[0]} does not answer")
        endpoint = await stack.enter_async_context(
            ChatEndpoint(options.url, options.model, key=key, sampling=sampling,
                         retries=options.retries, timeout_seconds=options.timeout)
        )  # fmt: skip
        construction = Construction(
            traces, options.output, template, endpoint, runner(client, interpreter), instruction=instruction,
            settings=sampling, retry_rejected=options.retry_rejected,
        )  # fmt: skip
        return await construction.work(options.concurrency, console)
