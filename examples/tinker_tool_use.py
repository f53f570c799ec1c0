"""Reinforcement learning with a tool, through the server of the Tinker protocol: the cookbook's loop, our sandbox.

The loop, the renderer, the tool library and the sandbox's client are tinker-cookbook 0.6.1's. This file adds the task:
questions from a parquet file in verl's columns, Python as the tool, a reward of 1 for the right number in \\boxed{}.

    megatron-retool tinker MODEL tinker.names=Qwen/Qwen3-4B-Instruct-2507      prints the two TINKER_ variables
    python -m tools.code_interpreter.server --port 8080                        the sandbox, at SANDBOX_URL
    python examples/tinker_tool_use.py data=runs/demo/data/train.parquet log_path=runs/tinker_tool_use

docs/tinker.md has the whole of it.
"""

import asyncio
from typing import Annotated

import chz
import pyarrow.parquet
from tinker_cookbook import cli_utils, model_info, renderers, tokenizer_utils
from tinker_cookbook.recipes.math_rl.math_grading import extract_boxed, grade_answer
from tinker_cookbook.rl.train import Config, main
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset, RLDatasetBuilder
from tinker_cookbook.sandbox import SandboxFusionClient
from tinker_cookbook.tool_use import build_agent_tool_env, simple_tool_result, tool

MOST_CHARACTERS = 120
"""A tool's result is cut to this length: a loop that a model writes may print megabytes."""


class CodeInterpreter:
    """Python in a sandbox. Every call begins with no variables."""

    def __init__(self, client):
        self._client = client

    @tool
    async def code_interpreter(self, code: Annotated[str, "The Python code to run."]):
        """Run Python code and return what it prints."""
        success, answer = await self._client.run(code, files={}, timeout=2)
        ran = answer.get("run_result") or {}
        said = (
            ran.get("stdout")
            if success
            else (ran.get("stderr") or answer.get("error") or "").strip().rpartition("\n")[2]
        )
        return simple_tool_result((said or "").strip()[:MOST_CHARACTERS])


@chz.chz
class Question(EnvGroupBuilder):
    """One question, asked ``group_size`` times: its advantages are relative to the group's mean."""

    messages: list
    answer: str
    group_size: int
    renderer: renderers.Renderer
    client: SandboxFusionClient
    max_tokens: int
    max_trajectory_tokens: int

    async def _reward(self, history):
        said = renderers.get_text_content(history[-1]) if history[-1]["role"] == "assistant" else ""
        try:
            correct = grade_answer(extract_boxed(said), self.answer)
        except ValueError:
            correct = False
        return float(correct), {"correct": float(correct)}

    async def make_envs(self):
        return [
            build_agent_tool_env(
                renderer=self.renderer,
                tools=[CodeInterpreter(self.client).code_interpreter],
                initial_messages=list(self.messages),
                reward_fn=self._reward,
                max_turns=4,
                max_generation_tokens=self.max_tokens,
                max_trajectory_tokens=self.max_trajectory_tokens,
                failed_parse_reward=0.0,
                context_overflow_reward=0.0,
            )
            for _ in range(self.group_size)
        ]


class Questions(RLDataset):
    """Batches of questions in the file's order, from its beginning again after its end."""

    def __init__(self, builders, groups_per_batch, steps):
        self._builders, self._groups, self._steps = builders, groups_per_batch, steps

    def get_batch(self, index):
        first = index * self._groups
        return [self._builders[(first + place) % len(self._builders)] for place in range(self._groups)]

    def __len__(self):
        return self._steps


@chz.chz
class QuestionsBuilder(RLDatasetBuilder):
    """Reads the file when the loop starts."""

    client: SandboxFusionClient
    data: str
    system_prompt: str
    model_name: str
    renderer_name: str
    groups_per_batch: int
    group_size: int
    max_tokens: int
    max_trajectory_tokens: int
    max_steps: int

    async def __call__(self):
        tokenizer = tokenizer_utils.get_tokenizer(self.model_name)
        renderer = renderers.get_renderer(self.renderer_name, tokenizer)
        rows = pyarrow.parquet.read_table(self.data, columns=["prompt", "reward_model"]).to_pylist()
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        builders = [
            Question(
                messages=system + row["prompt"],
                answer=str(row["reward_model"]["ground_truth"]),
                group_size=self.group_size,
                renderer=renderer,
                client=self.client,
                max_tokens=self.max_tokens,
                max_trajectory_tokens=self.max_trajectory_tokens,
            )
            for row in rows
        ]
        return Questions(builders, self.groups_per_batch, self.max_steps), None


@chz.chz
class Settings:
    """Words of the command line: name=value."""

    data: str
    log_path: str
    model_name: str = "Qwen/Qwen3-4B-Instruct-2507"
    # The tools as the model's chat template lists them; the demo's model knows this form.
    system_prompt: str = '<tools>\n{"name": "code_interpreter", "arguments": {"code": "string"}}\n</tools>'
    groups_per_batch: int = 16
    group_size: int = 8
    max_tokens: int = 96
    max_trajectory_tokens: int = 256
    max_steps: int = 20
    learning_rate: float = 1e-3
    lora_rank: int = 16
    loss_fn: str = "importance_sampling"
    save_every: int = 0


async def train(settings):
    renderer_name = model_info.get_recommended_renderer_name(settings.model_name)
    names = [name for name in QuestionsBuilder.__annotations__ if name in Settings.__annotations__]
    client = SandboxFusionClient()
    questions = QuestionsBuilder(
        client=client,
        renderer_name=renderer_name,
        **{name: getattr(settings, name) for name in names},
    )
    config = Config(
        learning_rate=settings.learning_rate,
        dataset_builder=questions,
        model_name=settings.model_name,
        recipe_name="tool_use",
        renderer_name=renderer_name,
        lora_rank=settings.lora_rank,
        loss_fn=settings.loss_fn,
        max_tokens=settings.max_tokens,
        log_path=settings.log_path,
        eval_every=0,
        save_every=settings.save_every,
    )
    try:
        await main(config)
    finally:
        await client.close()


if __name__ == "__main__":
    given = chz.entrypoint(Settings)
    cli_utils.check_log_dir(given.log_path, behavior_if_exists="raise")
    asyncio.run(train(given))
