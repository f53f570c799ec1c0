"""TRL's half of benchmarks/trl_grpo.py: trains with GRPOTrainer as a file of settings says. Run by that command.

    <TRL's environment>/bin/python benchmarks/trl_grpo_trainer.py settings.json

It imports nothing of this project. Tool and reward are asked for at ``service``. In ``output`` it leaves steps.jsonl, a
row for each generation with the updates that follow it, and the weights after the steps of ``save_at`` in step_N/.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template


class Service:
    """Tool and reward of the other process. ``tool_seconds``: spent in calls so far."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.tool_seconds = 0.0

    def call_tool(self, code: Any) -> str:
        began = time.perf_counter()
        text: str = self._post("tool", {"code": code})["text"]
        self.tool_seconds += time.perf_counter() - began
        return text

    def score(self, rows: list[int], response_ids: list[list[int]]) -> dict[str, Any]:
        return self._post("score", {"rows": rows, "response_ids": response_ids})

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                reply: dict[str, Any] = json.load(response)
                return reply
        except (OSError, ValueError) as error:
            # The trainer tells the policy of any Exception that a tool raises, and continues.
            raise SystemExit(f"{self._url}/{path}: {error}") from error


class StepRecorder(TrainerCallback):
    """Times each generation with its updates, and saves weights between them."""

    def __init__(self, settings: dict[str, Any], service: Service) -> None:
        self._updates = settings["updates_per_step"]
        self._save_at = frozenset(settings["save_at"])
        self._base = Path(settings["model"])
        self._output = Path(settings["output"])
        self._service = service
        self._row: dict[str, Any] = {}
        self._began = 0.0

    def score(self, row: list[int], completion_ids: list[list[int]], **_: Any) -> list[float]:
        """The reward function."""
        began = time.perf_counter()
        reply = self._service.score(row, completion_ids)
        ended = time.perf_counter()
        self._row |= {
            "experience_seconds": ended - self._began,
            "tool_seconds": self._service.tool_seconds,
            "reward_seconds": ended - began,
            "responses": len(completion_ids),
            "response_tokens": sum(map(len, completion_ids)),
            "sampled_tokens": reply["sampled_tokens"],
            "accuracy": sum(reply["accuracies"]) / len(reply["accuracies"]),
        }
        scores: list[float] = reply["scores"]
        return scores

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._updates == 0:
            self._service.tool_seconds = 0.0
            self._row = {}
            self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **_: Any) -> None:
        if state.global_step % self._updates:
            return
        seconds = time.perf_counter() - self._began
        step = state.global_step // self._updates
        with open(self._output / "steps.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "seconds": seconds, **self._row}) + "\n")
        if step in self._save_at:
            save(model, self._base, self._output / f"step_{step}")


def save(model: Any, base: Path, directory: Path) -> None:
    """The weights of ``model``, all else as ``base`` has it: another transformers may write it otherwise."""
    model.save_pretrained(directory)
    for file in base.iterdir():
        if file.suffix in (".json", ".jinja") and ".safetensors" not in file.name:
            shutil.copy(file, directory)


def check_prompts(tokenizer: Any, tool: Any, prompts: list[dict[str, Any]]) -> None:
    """Exit where the chat template gives a prompt other tokens than the other side has."""
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            prompt["messages"], tools=[tool], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        if ids != prompt["prompt_ids"]:
            texts = [repr(tokenizer.decode(each)) for each in (ids, prompt["prompt_ids"])]
            sys.exit(f"prompt {prompt['row']} is not the same for both: TRL has {texts[0]}, megatron-retool {texts[1]}")


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(settings["threads"])
    with open(settings["prompts"], encoding="utf-8") as file:
        prompts = [json.loads(line) for line in file]
    service = Service(settings["service"])

    def code_interpreter(code: str) -> str:
        """
        Run Python code and return what it prints. Each call starts afresh.

        Args:
            code: The Python code to run.
        """
        return service.call_tool(code)

    tokenizer = AutoTokenizer.from_pretrained(settings["model"], padding_side="left")
    # TRL knows the calls of a chat template by its whole text, and this text is the demo's own; the calls are Qwen's.
    tokenizer.response_template = qwen3_template
    check_prompts(tokenizer, code_interpreter, prompts)
    recorder = StepRecorder(settings, service)
    trainer = GRPOTrainer(
        model=settings["model"],
        reward_funcs=recorder.score,
        args=GRPOConfig(output_dir=settings["output"], **settings["grpo"]),
        train_dataset=Dataset.from_list([{"prompt": row["messages"], "row": row["row"]} for row in prompts]),
        processing_class=tokenizer,
        tools=[code_interpreter],
        callbacks=[recorder],
    )
    trainer.train()


if __name__ == "__main__":
    main()
