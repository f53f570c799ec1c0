"""Engines, tools and sandbox of a served model, started together and stopped together, without a learner and Ray.

    async with Service(config, say, log_directory=logs, tools=True) as service:
        service.sampler, service.renderer, service.tools, ...

What can be checked without a process is checked first. An engine, or the code interpreter, that ends is started again;
calls wait for it meanwhile. Whatever happens, leaving the block stops every process that was started.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess, kept_running
from megatron_retool.cluster.checks import check_model
from megatron_retool.config import Config, ConfigError, RolloutConfig
from megatron_retool.config.cluster import visible_devices
from megatron_retool.data.tokenizer import TOKENIZER_FILES, load_tokenizer
from megatron_retool.machine import nvidia_smi
from sglang_rollout.engine.base import EngineError, EngineServer
from sglang_rollout.engine.configured import make_engine
from sglang_rollout.engine.launch_command import resolve_device
from sglang_rollout.engine.pool import EnginePool
from sglang_rollout.engine.rollout_statistics import RolloutStatistics
from sglang_rollout.gateway.rendering import ContextRenderer
from sglang_rollout.gateway.sampler import PoolSampler
from tools.code_interpreter_tool import client_of_named_servers
from tools.registry import ToolRegistry

RETRY_SECONDS = 10.0
"""Until the next try, where an engine could not be started again."""
_LOOK_SECONDS = 0.5
Say = Callable[[str], None]


class Service:
    """What answers calls; an asynchronous context manager.

    Args:
        config: model.path is a Hugging Face directory.
        say: prints a line for people.
        log_directory: gets what engines and sandbox print.
        tools: start the tools of rollout.multi_turn.tools.

    Attributes:
        renderer: of the model's chat template.
        stop_strings: whether the engines can end a turn at a text.
        steers: whether they take penalties and grammars.
        tools: started; None: they were not asked for.
        pool: the engines.
        sampler: where tokens come from.
    """

    renderer: ContextRenderer
    pool: EnginePool
    sampler: PoolSampler

    def __init__(self, config: Config, say: Say, *, log_directory: Path, tools: bool) -> None:
        self.config = config
        self.tokenizer: Any = None
        self.tools: ToolRegistry | None = None
        self.stop_strings = any((Path(config.model.path) / name).is_file() for name in TOKENIZER_FILES)
        self.steers = False
        self._with_tools = tools
        self._say = say
        self._logs = log_directory
        self._stack = AsyncExitStack()
        self._servers: list[EngineServer] = []
        self._starts: list[asyncio.Future[None]] = []
        self._threads = ThreadPoolExecutor(config.rollout.engine.count, thread_name_prefix="engine-start")

    async def __aenter__(self) -> Service:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        check_model(config, learns=False)
        self.tokenizer = load_tokenizer(config.model)
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                f"model.path={config.model.path}: the tokenizer has no chat template, which says how messages become "
                "text: take an instruction-tuned model's (model.tokenizer_path=…), or put a chat_template into its "
                "tokenizer_config.json"
            )
        self.renderer = ContextRenderer(self.tokenizer, config.rollout.multi_turn)
        engine = make_engine(config)
        self.steers = bool(getattr(engine, "steers", False))
        self._servers = [
            engine.server(
                index,
                model_path=config.model.path,
                host="127.0.0.1",
                log_file=self._logs / f"engine_{index}.log",
                tokenizer=self.stop_strings,
                weights_from_sync=False,
                gpu_ids=gpus,
            )
            for index, gpus in enumerate(engine_gpus(config.rollout))
        ]
        if self._with_tools:
            await self._start_tools()
        count = len(self._servers)
        self._say(f"starting {count} engine{'s' if count > 1 else ''} ({config.rollout.engine.backend})")
        self._stack.callback(self._threads.shutdown)
        self._stack.push_async_callback(self._stop_engines)
        loop = asyncio.get_running_loop()
        self._starts = [loop.run_in_executor(self._threads, server.start) for server in self._servers]
        await asyncio.gather(*map(asyncio.shield, self._starts))
        statistics = RolloutStatistics()
        urls = [server.base_url for server in self._servers]
        self.pool = EnginePool(engine, urls, config.rollout, statistics, self._restarted)
        self._stack.push_async_callback(self.pool.close)
        # An engine in this process loads its model now, and not when the first client waits.
        await self.pool.weight_version()
        self.sampler = PoolSampler(self.pool, statistics)

    async def _start_tools(self) -> None:
        config = self.config
        interpreter = config.tools.code_interpreter
        client: CodeInterpreterClient | None = None
        owned = config.rollout.multi_turn.uses_code_interpreter and not interpreter.urls
        if owned:
            client = CodeInterpreterClient([])
        elif config.rollout.multi_turn.uses_code_interpreter:
            client = await client_of_named_servers(interpreter)
        self.tools = ToolRegistry.from_config(config.tools, config.rollout.multi_turn.tools, code_interpreter=client)
        if not self.tools.names:
            raise ConfigError("rollout.multi_turn.tools is empty: there are no tools to run; leave --tools out")
        if owned and client is not None:
            log_file = self._logs / "code_interpreter.log"
            server = SandboxServerProcess(interpreter, port=interpreter.port, log_file=log_file)
            self._stack.callback(server.stop)
            client.put_server(0, server.start())
            watch = asyncio.create_task(kept_running(server, self._say))
            self._stack.callback(watch.cancel)
        await self._stack.enter_async_context(self.tools)

    async def _restarted(self, url: str) -> str:
        """The engine at ``url``, which died, restarted; its new URL."""
        server = next(server for server in self._servers if server.base_url == url)
        self._say(f"engine {self._servers.index(server)} ended: starting it again")
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(self._threads, server.stop)
            start = loop.run_in_executor(self._threads, server.start)
            self._starts.append(start)
            try:
                await asyncio.shield(start)
                return server.base_url
            except EngineError as error:
                self._say(f"engine {self._servers.index(server)} does not start again: {error}")
                await asyncio.sleep(RETRY_SECONDS)

    async def _stop_engines(self) -> None:
        """Also those that are just starting: that ends when their process does."""
        while True:
            await asyncio.gather(*(asyncio.to_thread(server.stop) for server in self._servers))
            if all(start.done() for start in self._starts):
                break
            await asyncio.wait(self._starts, timeout=_LOOK_SECONDS)
        await asyncio.gather(*self._starts, return_exceptions=True)


def engine_gpus(rollout: RolloutConfig) -> list[list[str] | None]:
    """What each engine has for CUDA_VISIBLE_DEVICES; None without CUDA.

    Raises:
        ConfigError: this machine has too few GPUs.
    """
    engine = rollout.engine
    if resolve_device(engine.device) == "cpu":
        return [None] * engine.count
    each, result = engine.tensor_parallel_size, len(nvidia_smi("name"))
    if engine.count * each > result:
        raise ConfigError(
            f"rollout.engine.count x tensor_parallel_size = {engine.count} x {each} GPUs, and this machine shows "
            f"{result}: lower them (rollout.engine.count=1 serves from one engine), or set rollout.engine.device=cpu"
        )
    inherited = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [list(visible_devices(range(index * each, (index + 1) * each), inherited)) for index in range(engine.count)]
