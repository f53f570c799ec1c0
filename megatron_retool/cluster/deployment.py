"""Everything a run consists of, started together and stopped together.

    async with Deployment(config, console) as run:
        run.learner, run.engines, run.weights, run.rollout, run.rewards, run.prompts, ...

Starting checks what can be checked without processes first (data, tokenizer, placement), then starts sandbox, engines
and learner side by side. Whatever happens, leaving the block stops every process that was started.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any

from rich.console import Console

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess, kept_running
from megatron_retool.cluster.engine_changes import EngineChanges
from megatron_retool.cluster.engine_group import EngineGroup
from megatron_retool.cluster.engine_weights import EngineWeights
from megatron_retool.cluster.gpu_phases import GpuPhases
from megatron_retool.cluster.hang_watchdog import HangWatchdog, ray_node_stacks
from megatron_retool.cluster.learner_group import LearnerGroup
from megatron_retool.cluster.log_prob_check import LogProbCheck
from megatron_retool.cluster.placement import Placement, check_weight_sync, needs_critic, plan_placement
from megatron_retool.cluster.runtime import all_node_ids, lost_nodes, node_ids, ray_runtime
from megatron_retool.cluster.sandbox_group import SandboxGroup
from megatron_retool.cluster.stopped_processes import end_stopped_processes
from megatron_retool.cluster.teachers import Teachers, check_teacher_files
from megatron_retool.config import Config, DataConfig, TrainerConfig, save_config
from megatron_retool.data.prompts import PromptSource, ValidationSet
from megatron_retool.data.tokenizer import load_tokenizer
from megatron_retool.errors import OperationError
from megatron_retool.rewards.manager import RewardManager, check_data_sources, check_reward
from megatron_retool.runs.environment import record_environment
from megatron_retool.runs.progress import Activities
from megatron_retool.runs.step_timer import StepTimer
from megatron_retool.runs.write_errors import WriteErrors
from megatron_retool.trajectory import Trajectory
from run_files.phases import Phase
from sglang_rollout.agent.agents import make_agent
from sglang_rollout.rollout_manager import RolloutManager
from tools.code_interpreter_tool import client_of_named_servers
from tools.registry import ToolRegistry


class Deployment:
    """The run's processes and the objects that speak to them. ``with_learner=False``: only engines and tools."""

    learner: LearnerGroup
    critic: LearnerGroup | None = None
    engines: EngineGroup
    sandboxes: SandboxGroup | None = None
    """On several nodes, where no other servers are named."""
    gpu_phases: GpuPhases
    weights: EngineWeights
    rollout: RolloutManager
    rewards: RewardManager
    prompts: PromptSource
    validation_prompts: ValidationSet
    teachers: Teachers | None = None
    total_steps: int

    def __init__(self, config: Config, console: Console, *, with_learner: bool = True) -> None:
        self.config = config
        self.console = console
        self.with_learner = with_learner
        self.watchdog = HangWatchdog(config.trainer, console, self._stacks_of_nodes)
        self.write_errors = WriteErrors(console)
        self.activities = Activities(console)
        self._starting = self.watchdog.watch_start(StepTimer())
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Deployment:
        try:
            with self._starting.phase(Phase.START):
                await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        stopped = asyncio.create_task(end_stopped_processes(self.console))
        self._stack.callback(stopped.cancel)
        placement = plan_placement(config)
        if self.with_learner:
            check_weight_sync(config.weight_sync, config.rollout, placement)
        tokenizer = load_tokenizer(config.model)
        self._tokenizer = tokenizer
        client = await self._sandbox_client(placement)
        self.tools = ToolRegistry.from_config(config.tools, config.rollout.multi_turn.tools, code_interpreter=client)
        # An engine that has to find texts in what it samples needs the tokenizer.
        agent = make_agent(config.rollout, config.data, tokenizer, self.tools)
        self.validation_prompts = ValidationSet(config.data, tokenizer, self.tools)
        if self.with_learner:
            self.prompts = PromptSource(config.data, tokenizer, self.tools, config.trainer.seed)
            self.total_steps = total_training_steps(config.trainer, config.data, len(self.prompts))
            self.console.print(f"training on {self.prompts.counts}")
            check_data_sources(config.reward, self.prompts.data_sources)
        check_reward(config.reward, next(iter(self.validation_prompts), None))
        check_data_sources(config.reward, (row.data_source for row in self.validation_prompts))
        self.rewards = self._stack.enter_context(
            RewardManager(config.reward, tokenizer, config.data.max_response_length)
        )
        distillation = config.algorithm.distillation
        if self.with_learner and distillation.teachers:

            def encode(text: str) -> list[int]:
                return list(tokenizer.encode(text, add_special_tokens=False))

            if distillation.served:
                with self.activities.part("asking the teachers"):
                    self.teachers = await self._stack.enter_async_context(Teachers(distillation, encode))
            elif distillation.check_tokenizer:
                check_teacher_files(distillation, encode)
        await asyncio.sleep(0)  # starting takes seconds in which nothing is awaited: here it can be cancelled
        await self._start_tools(placement, client)
        await asyncio.sleep(0)
        config.trainer.run_dir.mkdir(parents=True, exist_ok=True)
        save_config(config, config.trainer.run_dir / "config.yaml")
        record_environment(config.trainer.run_dir)
        tokenizer.save_pretrained(config.trainer.run_dir / "tokenizer")

        if placement.gpus_per_node or config.cluster.nodes > 1:
            self.console.print(placement.table())
        with self.activities.part("starting Ray" if config.cluster.ray_address == "local" else "joining Ray"):
            self._stack.enter_context(ray_runtime(config.cluster))
        self._placement = placement.on_nodes(node_ids(config.cluster))
        self.engines = EngineGroup(
            config,
            self._placement,
            tokenizer=bool(agent.stop.strings),
            weights_from_sync=self.with_learner,
        )
        self._stack.push_async_callback(self.engines.stop)
        self.gpu_phases = GpuPhases(
            self.with_learner and self._placement.colocated,
            models=lambda: list(self.models.values()),
            engines=lambda: self.engines.urls,
            client=self.engines.engine.client,
        )
        self.weights = EngineWeights(
            self.engines,
            config.model.path,
            (lambda: self.learner) if self.with_learner else None,
            self.gpu_phases,
            replaced=lambda url, new_url: self.rollout.replace_engine(url, new_url),
            starting=self._starting,
            console=self.console,
            check=LogProbCheck(config, tokenizer, self.engines.engine.client, self.console)
            if self.with_learner and config.weight_sync.check_log_probs
            else None,
        )
        starts = [self._start_engines()]
        if self.sandboxes is not None:
            self._stack.push_async_callback(self.sandboxes.stop)
            starts.append(self._start_sandboxes(self.sandboxes))
        if self.gpu_phases.enabled:
            await self._start_learner()
            await self.gpu_phases.engines_only()
        elif self.with_learner:
            starts.append(self._start_learner())
        await gather_or_cancel(starts)
        self.rollout = await self._stack.enter_async_context(
            RolloutManager(
                config,
                tokenizer,
                self.engines.urls,
                self.tools,
                engine=self.engines.engine,
                restart_engine=self.weights.restart,
            )
        )
        if self.with_learner:
            changes = EngineChanges(config.trainer.run_dir, self.engines, self.weights, self.rollout.engines, self._say)
            await self._stack.enter_async_context(changes.followed())

    async def _start_engines(self) -> None:
        engine = self.config.rollout.engine
        engines = "1 engine" if engine.count == 1 else f"{engine.count} engines"
        with self._starting.phase(Phase.START_ENGINES), self.activities.part(f"starting {engines}"):
            await self.engines.start(self.config.model.path)

    async def _start_sandboxes(self, sandboxes: SandboxGroup) -> None:
        with self.activities.part("starting a code interpreter on each node"):
            await sandboxes.start(self._placement)

    async def _start_learner(self) -> None:
        ranks = self.config.learner.world_size
        learner = "the learner" + (" and the critic" if needs_critic(self.config.algorithm) else "")
        with (
            self._starting.phase(Phase.START_LEARNER),
            self.activities.part(f"building {learner} ({'1 rank' if ranks == 1 else f'{ranks} ranks'})"),
        ):
            await self._build_learner()

    async def _build_learner(self) -> None:
        config = self.config
        responses = config.data.train_batch_size * config.rollout.train.n
        steps = self.total_steps * responses // config.learner.mini_batch_size
        learner = LearnerGroup(config, self._placement)
        critic = LearnerGroup(config, self._placement, role="critic") if needs_critic(config.algorithm) else None
        try:
            await gather_or_cancel([group.setup(steps) for group in (learner, critic) if group is not None])
        except BaseException:
            learner.kill()
            if critic is not None:
                critic.kill()
            raise
        # Only now: until then calls meet the ranks that died, and not some that are not ready.
        self.learner, self.critic = learner, critic

    @property
    def models(self) -> dict[str, LearnerGroup]:
        """The present learner and critic, by the name of their directory in a checkpoint."""
        return {"learner": self.learner} | ({"critic": self.critic} if self.critic is not None else {})

    async def restart_learner(self) -> None:
        """Build learner and critic again; engines and tools continue.

        Raises:
            RuntimeError: a node is gone, which no new process can replace.
            LearnerDied: a rank died once more.
        """
        for group in self.models.values():
            group.kill()
        ids = self._placement.node_ids
        # Engines of a node that is gone are left out; learner and critic have their places.
        lost = lost_nodes([ids[node] for node in sorted(self._placement.nodes_of("learner", "critic"))] if ids else ())
        if lost:
            raise OperationError(
                f"{', '.join(lost)} left Ray while the run was under way: start the run again, on other nodes; it "
                "resumes from its last checkpoint (a Slurm job requeues itself)"
            )
        with self._starting.phase(Phase.ENGINES_LEAVE):
            await self.gpu_phases.engines_leave()
        await self._start_learner()

    async def _sandbox_client(self, placement: Placement) -> CodeInterpreterClient | None:
        """Client of the named code interpreter servers, or of the run's own, none of which is started yet.

        Raises:
            ConfigError: a named server does not answer.
        """
        config = self.config
        if placement.sandboxes and config.cluster.nodes > 1:
            # Each node has a server, which ``self.sandboxes`` starts once Ray is there.
            self.sandboxes = SandboxGroup(config.tools.code_interpreter, config.trainer.run_dir, self.console)
            return self.sandboxes.client
        if placement.sandboxes:
            return CodeInterpreterClient([])
        if not config.rollout.multi_turn.uses_code_interpreter:
            return None
        return await client_of_named_servers(config.tools.code_interpreter)

    async def _start_tools(self, placement: Placement, client: CodeInterpreterClient | None) -> None:
        """Start the tools and, on a single node, the run's own code interpreter server."""
        if placement.sandboxes and self.sandboxes is None:
            assert client is not None
            interpreter = self.config.tools.code_interpreter
            log_file = self.config.trainer.run_dir / "logs" / "code_interpreter.log"
            server = SandboxServerProcess(interpreter, port=interpreter.port, log_file=log_file)
            with self.activities.part("starting the code interpreter"):
                client.put_server(0, server.start())
            self._stack.callback(server.stop)
            watch = asyncio.create_task(kept_running(server, self._warn))
            self._stack.callback(watch.cancel)
        await self._stack.enter_async_context(self.tools)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def _warn(self, text: str) -> None:
        self.console.print(text, style="yellow", markup=False)

    def _stacks_of_nodes(self) -> list[tuple[str, str]]:
        """A private Ray's processes are the driver's children; others are asked for."""
        return [] if self.config.cluster.ray_address == "local" else ray_node_stacks(all_node_ids())

    def decode(self, trajectory: Trajectory) -> tuple[str, str]:
        """Prompt and response as text, special tokens included."""
        return self._tokenizer.decode(trajectory.prompt_ids), self._tokenizer.decode(trajectory.response_ids)


def total_training_steps(trainer: TrainerConfig, data: DataConfig, num_prompts: int) -> int:
    """``trainer.total_steps``, or as many as ``total_epochs`` passes over the prompts take."""
    if trainer.total_steps is not None:
        return trainer.total_steps
    return trainer.total_epochs * math.ceil(num_prompts / data.train_batch_size)


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Await all side by side and return what they return; the first error cancels the others and is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
