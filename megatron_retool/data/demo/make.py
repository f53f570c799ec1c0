"""Writes the demo's files. The whole directory appears at once or not at all."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from megatron_retool.config import (
    Config,
    ConfigError,
    DemoConfig,
    LearnerConfig,
    RolloutConfig,
    ToolsConfig,
    TrainerConfig,
)
from megatron_retool.data.demo.facts import FactSearch, fact_families, make_facts
from megatron_retool.data.demo.pretrained import write_smollm2
from megatron_retool.data.demo.problems import FAMILIES, Fact, FactProblem, Family, Problem, distinct_problems, draw
from megatron_retool.data.demo.snippets import SnippetRunner
from megatron_retool.data.demo.tokenizer import build_tokenizer, check_vocabulary_size
from megatron_retool.data.demo.traces import (
    SYSTEM_PROMPT,
    WORDS_SYSTEM_PROMPT,
    DemoTools,
    prompt_messages,
    snippet,
    trace,
    with_calls_in_content,
)
from megatron_retool.data.demo.word_problems import WORD_FAMILIES
from megatron_retool.data.files import write_parquet
from megatron_retool.data.tagged_traces import Message
from tools.code_interpreter_tool import CodeInterpreterTool
from tools.search.tool import SearchTool

FORMAT_VERSION = 1
"""Goes up whenever the same settings would give other files, so that an old directory is made again."""

DATA_SOURCE = "demo_integer_math"
TOOLS = {
    "one_tool": (CodeInterpreterTool,),
    "two_tools": (CodeInterpreterTool, SearchTool),
    "word_problems": (CodeInterpreterTool,),
}
"""Tools that each variant's demonstrations call, in the order of the prompt."""
MANIFEST = "manifest.json"


def make_demo(config: Config) -> Path:
    """Write the demo into ``config.demo.directory`` unless it is there already, made from the same settings.

    The files depend on ``config.demo``, ``config.trainer.seed`` and the settings of what the tools return alone: the
    same settings give the same bytes. The questions of val.parquet appear in no other file, and no other question asks
    for an entity that one of them asks for.

    Returns:
        The directory.

    Raises:
        ConfigError: a setting makes no demo, or the directory holds something that make-demo did not write.
    """
    demo = config.demo
    _check(config.demo, config.learner, config.rollout)
    directory = Path(demo.directory)
    manifest = _manifest(config.demo, config.tools, config.trainer)
    if directory.exists():
        result = _read_manifest(directory)
        if result == manifest:
            return directory
        if result is None and any(directory.iterdir()):
            raise ConfigError(
                f"demo.directory={demo.directory} holds files that make-demo did not write: choose another directory"
            )
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        _write(config, partial)
        with open(partial / MANIFEST, "w", encoding="utf-8") as handle:
            json.dump(manifest, handle, indent=2)
            handle.flush()
            os.fsync(handle.fileno())
        partial.chmod(0o755)
        _replace(directory, partial)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return directory


def _check(demo: DemoConfig, learner: LearnerConfig, rollout: RolloutConfig) -> None:
    expected = [tool.name for tool in TOOLS[demo.variant]]
    if demo.variant != "one_tool" and rollout.multi_turn.tools != expected:
        raise ConfigError(
            f"demo.variant={demo.variant} teaches the tools {expected}: set rollout.multi_turn.tools to these, not "
            f"{rollout.multi_turn.tools}"
        )
    replay = learner.routing_replay
    if replay != "none" and demo.enable and not demo.num_experts:
        raise ConfigError(
            f"learner.routing_replay={replay} replays the choice of experts, and demo.num_experts=0 makes a dense "
            "model: set demo.num_experts, or learner.routing_replay=none"
        )
    if demo.pretrained is not None:
        return
    check_vocabulary_size(demo.vocab_size)
    if demo.hidden_size % demo.num_attention_heads or (demo.hidden_size // demo.num_attention_heads) % 2:
        raise ConfigError(
            f"demo.hidden_size={demo.hidden_size} must be demo.num_attention_heads={demo.num_attention_heads} times an "
            "even head size"
        )
    if demo.num_attention_heads % demo.num_key_value_heads:
        raise ConfigError(
            f"demo.num_attention_heads={demo.num_attention_heads} is not divisible by "
            f"demo.num_key_value_heads={demo.num_key_value_heads}"
        )


def _manifest(demo: DemoConfig, tools: ToolsConfig, trainer: TrainerConfig) -> dict[str, Any]:
    made = dataclasses.asdict(demo)
    del made["directory"], made["base"], made["pretrained_file"]
    if demo.pretrained is None:
        del made["pretrained"]
    if not demo.num_experts:
        # What was made before there were mixtures of experts is not made again.
        del made["num_experts"], made["num_experts_per_tok"], made["moe_intermediate_size"]
    shown = tools.search
    search: dict[str, Any] = {"top_k": shown.top_k, "show_ranks": shown.show_ranks}
    if shown.show_sources:
        search["show_sources"] = True
    return {
        "format_version": FORMAT_VERSION,
        "seed": trainer.seed,
        "demo": made,
        "code_interpreter": SnippetRunner(tools.code_interpreter).settings(),
        **({"search": search} if demo.variant == "two_tools" else {}),
    }


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        return json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None


def _replace(directory: Path, partial: Path) -> None:
    """Put ``partial`` in the place of ``directory``; a reader sees the old files or the new ones, never a mixture."""
    if not directory.exists():
        os.rename(partial, directory)
        return
    retired = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".retired", dir=directory.parent))
    os.rename(directory, retired / directory.name)
    os.rename(partial, directory)
    shutil.rmtree(retired)


@dataclasses.dataclass(frozen=True)
class _Task:
    """The problems of a variant: those of val.parquet and the others, and what their tools return."""

    families: Mapping[str, Family]
    val_families: Mapping[str, Family]
    tools: DemoTools
    facts: Sequence[Fact] = ()
    system_prompt: str = SYSTEM_PROMPT
    calls_in_content: bool = False
    """The model's chat template knows no tools."""

    @classmethod
    def of(cls, config: Config, rng: random.Random) -> _Task:
        """``rng`` makes the facts."""
        run = SnippetRunner(config.tools.code_interpreter)
        if config.demo.variant == "one_tool":
            return cls(FAMILIES, FAMILIES, DemoTools(run))
        if config.demo.variant == "word_problems":
            return cls(
                WORD_FAMILIES,
                WORD_FAMILIES,
                DemoTools(run),
                system_prompt=WORDS_SYSTEM_PROMPT,
                calls_in_content=True,
            )
        try:
            facts = make_facts(rng, config.demo.entities + config.demo.val_entities)
        except ValueError as error:
            raise ConfigError(f"demo.entities + demo.val_entities: {error}") from error
        val = facts[: len(facts) * config.demo.val_entities // (config.demo.entities + config.demo.val_entities)]
        tools = DemoTools(run, FactSearch(facts, config.tools.search))
        return cls(fact_families(facts[len(val) :]), fact_families(val), tools, facts)


def _write(config: Config, directory: Path) -> None:
    demo, seed = config.demo, config.trainer.seed
    schemas = [tool.schema for tool in TOOLS[demo.variant]]
    if demo.pretrained is not None:
        write_smollm2(directory / "model", None if demo.pretrained_file is None else Path(demo.pretrained_file))
    else:
        # For the tokenizer the same facts whatever the run's seed.
        sample = _Task.of(config, random.Random(7))
        tokenizer = build_tokenizer(sample.families, sample.tools, schemas, demo.vocab_size)
        _write_model(demo, seed, tokenizer, directory / "model")

    task = _Task.of(config, random.Random(f"{seed} facts"))
    if task.facts:
        write_parquet(directory / "corpus.parquet", _corpus_table(task.facts))

    # A generator for each file: asking for more rows of one leaves the others as they are.
    val = distinct_problems(random.Random(f"{seed} val"), demo.val_rows, families=task.val_families)
    held_out = {problem.question for problem in val}
    train = distinct_problems(random.Random(f"{seed} train"), demo.train_rows, held_out, task.families)
    write_parquet(directory / "val.parquet", _prompt_table(val, "test", task.system_prompt))
    write_parquet(directory / "train.parquet", _prompt_table(train, "train", task.system_prompt))

    def problems(rng: random.Random, count: int) -> Iterator[Problem | FactProblem]:
        """The families in turn; questions may repeat."""
        names = list(task.families)
        for row in range(count):
            yield draw(rng, names[row % len(names)], held_out, task.families)

    def traces(name: str, count: int) -> list[tuple[list[Message], str]]:
        rng = random.Random(f"{seed} {name}")
        made = [trace(rng, problem, task.tools, task.system_prompt) for problem in problems(rng, count)]
        shown = ((with_calls_in_content(m) if task.calls_in_content else m) for m, _ in made)
        write_parquet(directory / f"{name}.parquet", _conversation_table(shown, schemas))
        return made

    held_out |= {messages[1]["content"] for messages, _ in traces("sft_val", demo.sft_val_rows)}
    kinds = Counter(kind for _, kind in traces("sft", demo.sft_rows))

    if demo.pretrained is None:
        rng = random.Random(f"{seed} pretrain")
        snippets = (snippet(rng, problem, task.tools) for problem in problems(rng, demo.pretrain_rows))
        write_parquet(directory / "pretrain.parquet", _conversation_table(snippets, schemas))

    (directory / "README.txt").write_text(
        f"Written by `python -m megatron_retool make-demo` with seed {seed}.\n"
        f"sft.parquet: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}\n",
        encoding="utf-8",
    )


def _conversation_table(conversations: Iterable[list[Message]], schemas: list[dict[str, Any]]) -> pa.Table:
    # JSON text and no nested columns: Arrow would fill every field that one message has and another lacks with null.
    texts = [json.dumps(messages) for messages in conversations]
    return pa.table({"messages": texts, "tools": [json.dumps(schemas)] * len(texts)})


def _corpus_table(facts: Sequence[Fact]) -> pa.Table:
    return pa.table({"id": [str(row) for row in range(len(facts))], "text": [fact.text for fact in facts]})


def _prompt_table(problems: Sequence[Problem | FactProblem], split: str, system_prompt: str) -> pa.Table:
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    return pa.table(
        {
            "data_source": pa.array([DATA_SOURCE] * len(problems)),
            "prompt": pa.array([prompt_messages(p.question, system_prompt) for p in problems], pa.list_(message)),
            "ability": pa.array(["math"] * len(problems)),
            "reward_model": pa.array([{"style": "rule", "ground_truth": str(p.answer)} for p in problems]),
            "extra_info": pa.array(
                [
                    {"split": split, "index": row, "family": p.family, "question": p.question}
                    for row, p in enumerate(problems)
                ]
            ),
        }
    )


def _write_model(demo: DemoConfig, seed: int, tokenizer: Any, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    settings = {
        **demo.hf_config,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        # Narrow layers need larger weights than the usual 0.02 for the residual stream to carry anything at first.
        "initializer_range": 0.05,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
