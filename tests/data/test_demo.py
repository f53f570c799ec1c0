"""The demo's files: what they hold, that a seed fixes them, and that they appear at once or not at all."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from code_interpreter.client import CodeInterpreterClient
from code_interpreter.process import SandboxServerProcess
from conversion.model.architecture import Architecture
from megatron_retool.config import ConfigError
from megatron_retool.data.demo import make, make_demo
from megatron_retool.data.demo.facts import FactSearch, fact_families, make_facts, value_in
from megatron_retool.data.demo.problems import FAMILIES, FactProblem, draw
from megatron_retool.data.demo.snippets import SnippetRunner
from megatron_retool.data.demo.traces import DemoTools, trace
from megatron_retool.planning.models import demo_architecture
from tests.data.conftest import demo_config
from tools.code_interpreter_tool import CodeInterpreterTool
from tools.registry import ToolRegistry
from tools.tool import TrajectoryInfo

TWO_TOOLS = (
    "demo.variant=two_tools", "rollout.multi_turn.tools=[code_interpreter,search]", "demo.entities=60",
    "demo.val_entities=10", "tools.search.top_k=1", "tools.search.show_ranks=false",
)  # fmt: skip
EXPERTS = ("demo.num_experts=6", "demo.num_experts_per_tok=3", "demo.moe_intermediate_size=16")
INTERPRETER = demo_config(Path("unused")).tools.code_interpreter


def rows(path: Path) -> list[dict]:
    return pq.read_table(path).to_pylist()


def questions(path: Path) -> set[str]:
    if "prompt" in pq.read_schema(path).names:
        return {row["prompt"][-1]["content"] for row in rows(path)}
    found = set()
    for row in rows(path):
        found |= {m["content"] for m in json.loads(row["messages"]) if m["role"] == "user"}
    return found


def digests(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def sandbox_url():
    with SandboxServerProcess(INTERPRETER) as server:
        yield server.url


@pytest.fixture(scope="module")
def two_tools_directory(tmp_path_factory):
    return make_demo(demo_config(tmp_path_factory.mktemp("two_tools") / "data", *TWO_TOOLS))


def test_files_and_columns(demo_directory):
    for name, count in (("pretrain", 120), ("sft", 240), ("sft_val", 24)):
        found = rows(demo_directory / f"{name}.parquet")
        assert len(found) == count
        assert set(found[0]) == {"messages", "tools"}
        assert json.loads(found[0]["tools"])[0]["function"]["name"] == "code_interpreter"
    for name, count, split in (("train", 60, "train"), ("val", 18, "test")):
        found = rows(demo_directory / f"{name}.parquet")
        assert len(found) == count
        for index, row in enumerate(found):
            assert set(row) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
            assert [message["role"] for message in row["prompt"]] == ["system", "user"]
            assert row["reward_model"]["style"] == "rule"
            assert int(row["reward_model"]["ground_truth"]) >= 0
            assert row["extra_info"]["split"] == split
            assert row["extra_info"]["index"] == index
    assert {row["extra_info"]["family"] for row in rows(demo_directory / "val.parquet")} == set(FAMILIES)


def test_held_out_questions_are_in_no_other_file(demo_directory):
    val = questions(demo_directory / "val.parquet")
    for name in ("train", "sft", "sft_val", "pretrain"):
        assert not val & questions(demo_directory / f"{name}.parquet"), name
    assert not questions(demo_directory / "sft_val.parquet") & questions(demo_directory / "sft.parquet")


def test_the_seed_fixes_every_byte(demo_directory, tmp_path):
    again = make_demo(demo_config(tmp_path / "again"))
    assert digests(again) == digests(demo_directory)
    other = digests(make_demo(demo_config(tmp_path / "other", "trainer.seed=1")))
    changed = {name for name, digest in digests(demo_directory).items() if other[name] != digest}
    assert {f"{name}.parquet" for name in ("pretrain", "sft", "sft_val", "train", "val")} <= changed
    assert "model/model.safetensors" in changed
    assert "model/tokenizer.json" not in changed


def test_a_directory_made_from_the_same_settings_is_left_alone(tmp_path):
    config = demo_config(tmp_path / "data")
    directory = make_demo(config)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    make_demo(config)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    make_demo(demo_config(tmp_path / "data", "demo.val_rows=6"))
    assert len(rows(directory / "val.parquet")) == 6
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(make, "_write_model", fail)
    with pytest.raises(OSError, match="no space"):
        make_demo(demo_config(tmp_path / "data"))
    assert list(tmp_path.iterdir()) == []


def test_foreign_directories_and_impossible_settings_are_refused(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="did not write"):
        make_demo(demo_config(tmp_path / "mine"))
    for override, key in (
        ("demo.vocab_size=500", "demo.vocab_size"),
        ("demo.vocab_size=8192", "demo.vocab_size"),
        ("demo.num_key_value_heads=3", "demo.num_key_value_heads"),
        ("demo.hidden_size=30", "demo.hidden_size"),
        ("demo.val_rows=0", "demo.val_rows"),
        ("learner.routing_replay=rollout", "demo.num_experts=0"),
    ):
        with pytest.raises(ConfigError, match=key):
            make_demo(demo_config(tmp_path / "data", "demo.enable=true", override))
    assert not (tmp_path / "data").exists()


def test_tokenizer(demo_directory, tokenizer):
    from tokenizers import Tokenizer

    assert len(tokenizer) == tokenizer.vocab_size + len(tokenizer.get_added_vocab()) == 512
    assert max(tokenizer.get_vocab().values()) == 511
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert len(tokenizer(token).input_ids) == 1
    text = "The 1234 cats' αβγ code:\n\n\tprint(sum(range(10,99+1)))  # 😀"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    # The class that transformers picks for the model must not bring another way to split text.
    assert ids == Tokenizer.from_file(str(demo_directory / "model" / "tokenizer.json")).encode(text).ids
    digits = [token for token in tokenizer.tokenize("98765") if token.strip("Ġ")]
    assert digits == list("98765")
    prompt = rows(demo_directory / "val.parquet")[0]["prompt"]
    tools = json.loads(rows(demo_directory / "sft.parquet")[0]["tools"])
    text = tokenizer.apply_chat_template(prompt, tools=tools, tokenize=False, add_generation_prompt=True)
    assert '{"name": "code_interpreter", "arguments": {"code": "string"}}' in text
    assert len(tokenizer(text).input_ids) < 75


def test_model_is_what_the_configuration_says(demo_directory):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(demo_directory / "model")
    assert model.config.model_type == "qwen2"
    assert model.config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert model.config.vocab_size == 512
    assert 0.045 < model.model.embed_tokens.weight.std() < 0.055


def test_a_mixture_of_experts_is_untied_and_loads_whole(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    directory = make_demo(demo_config(tmp_path / "data", *EXPERTS))
    model, loading = AutoModelForCausalLM.from_pretrained(directory / "model", output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.config.model_type == "qwen3_moe" and model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    architecture = Architecture.from_pretrained(directory / "model")
    assert (architecture.num_experts, architecture.num_experts_per_tok, architecture.moe_ffn_hidden_size) == (6, 3, 16)
    assert not architecture.tie_word_embeddings
    planned = demo_architecture(demo_config(directory, *EXPERTS).demo)
    written = {f.name: getattr(architecture, f.name) for f in dataclasses.fields(Architecture)}
    differing = {name for name, value in written.items() if getattr(planned, name) != value}
    assert differing <= {"dtype", "hf_config", "initializer_range", "max_position_embeddings", "rope_scaling"}


def test_a_dense_model_knows_nothing_of_experts(demo_directory, tmp_path):
    """Neither its weights nor its manifest: a directory from before there were experts is left alone."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(demo_directory / "model"))
    written = AutoModelForCausalLM.from_pretrained(demo_directory / "model")
    assert all(torch.equal(weight, written.state_dict()[name]) for name, weight in expected.state_dict().items())
    manifest = json.loads((demo_directory / "manifest.json").read_text())["demo"]
    assert "num_layers" in manifest and not [key for key in manifest if "expert" in key or "moe" in key]
    dense, experts = demo_config(tmp_path / "data", "demo.val_rows=6"), demo_config(tmp_path / "data", *EXPERTS)
    assert json.loads((make_demo(dense) / "manifest.json").read_text())["demo"].keys() == manifest.keys()
    assert json.loads((make_demo(experts) / "manifest.json").read_text())["demo"]["num_experts"] == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_snippets_do_what_they_are_meant_to(family):
    rng = random.Random(3)
    run = SnippetRunner(INTERPRETER)
    wrong = []
    for _ in range(40):
        problem = draw(rng, family)
        output = run(problem.code.correct)
        assert output.succeeded
        assert output.text == str(problem.answer)
        assert not any(run(code).succeeded for code in problem.code.failing)
        wrong += [run(code) for code in problem.code.wrong]
        assert all(output.succeeded for output in wrong)
        assert len(output.text) <= 60
    agreeing = sum(output.text == str(problem.answer) for output in wrong[-2:])
    assert agreeing < 2


@pytest.mark.parametrize("style", ["last_line", "traceback"])
@pytest.mark.parametrize("print_last_expression", [False, True])
def test_outputs_are_the_real_sandboxs(sandbox_url, style, print_last_expression):
    """Demonstrations show what the tool is going to return when the model runs the same code later."""
    config = dataclasses.replace(INTERPRETER, error_style=style, print_last_expression=print_last_expression)
    run = SnippetRunner(config)
    rng = random.Random(11)
    codes = ["print(1)\nprint(2)", "1", "None", "", "x = 3", "print('a');print(1/0)", "import nothing", "  print(1)"]
    for family in FAMILIES:
        problem = draw(rng, family)
        codes += [problem.code.correct, *problem.code.wrong, *problem.code.failing]

    async def ask() -> list[str]:
        tool = CodeInterpreterTool(config, CodeInterpreterClient(sandbox_url))
        try:
            return [(await tool.call({"code": code})).text for code in codes]
        finally:
            await tool.stop()

    assert dict(zip(codes, asyncio.run(ask()), strict=True)) == {code: run(code).text for code in codes}


def test_traces_show_what_the_tool_returns():
    rng = random.Random(5)
    run = SnippetRunner(INTERPRETER)
    kinds = {}
    for index in range(600):
        problem = draw(rng, list(FAMILIES)[index % len(FAMILIES)])
        messages, kind = trace(rng, problem, DemoTools(run))
        kinds[kind] = kinds.get(kind, 0) + 1
        for place, message in enumerate(messages):
            if message["role"] == "tool":
                code = messages[place - 1]["tool_calls"][0]["function"]["arguments"]["code"]
                assert message["content"] == run(code).text
        if kind in ("correct", "retry"):
            assert messages[-1]["content"] == f"The answer is \\boxed{{{problem.answer}}}."
    assert set(kinds) == {"guess", "correct", "wrong", "retry", "give_up"}
    assert 0.25 < kinds["guess"] / 600 < 0.4
    assert 0.15 < kinds["correct"] / 600 < 0.3


def test_two_tools_have_their_corpus_and_their_prompts(two_tools_directory):
    corpus = rows(two_tools_directory / "corpus.parquet")
    assert len(corpus) == 2 * 70 and set(corpus[0]) == {"id", "text"}
    known = {row["text"].split()[3] for row in corpus}
    assert len(known) == 70
    val = rows(two_tools_directory / "val.parquet")
    families = {row["extra_info"]["family"] for row in val}
    assert families == {"arithmetic", "power_modulo", "range_sum", "fact", "fact_arithmetic", "fact_range_sum"}

    def entities(name: str) -> set[str]:
        words = {word.strip("?.,") for question in questions(two_tools_directory / name) for word in question.split()}
        return words & known

    held_out = entities("val.parquet")
    assert held_out and len(entities("train.parquet")) > 15
    for name in ("train", "sft", "sft_val", "pretrain"):
        assert not held_out & entities(f"{name}.parquet"), name
    schemas = json.loads(rows(two_tools_directory / "sft.parquet")[0]["tools"])
    assert [schema["function"]["name"] for schema in schemas] == ["code_interpreter", "search"]


def test_searches_in_demonstrations_are_the_real_tools(two_tools_directory):
    """On the corpus that was written, as at reinforcement learning; and the answers are those of the corpus."""
    config = demo_config(
        two_tools_directory, *TWO_TOOLS, f"tools.search.corpus={two_tools_directory / 'corpus.parquet'}"
    )
    searches = []
    for row in rows(two_tools_directory / "sft.parquet"):
        messages = json.loads(row["messages"])
        for message, result in zip(messages, messages[1:], strict=False):
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] == "search":
                    searches.append((call["function"]["arguments"], result["content"]))
    assert len(searches) > 50 and any(text == "No passage matches." for _, text in searches)

    async def ask() -> list[str]:
        async with ToolRegistry.from_config(config.tools, ["search"]) as registry:
            tools = await registry.open(TrajectoryInfo(0, 0))
            return [(await tools.call("search", arguments)).text for arguments, _ in searches]

    assert asyncio.run(ask()) == [text for _, text in searches]
    values = {row["text"][:-1].rsplit(" is ")[0]: row["text"][:-1].rsplit(" ")[-1] for row in
              rows(two_tools_directory / "corpus.parquet")}  # fmt: skip
    facts = [row for row in rows(two_tools_directory / "val.parquet") if row["extra_info"]["family"] == "fact"]
    for row in facts:
        asked = row["prompt"][1]["content"].rstrip("?.").split("the ")[1]
        assert row["reward_model"]["ground_truth"] == values[f"The {asked}"]


def test_queries_and_code_of_facts_do_what_they_are_meant_to():
    rng = random.Random(3)
    facts = make_facts(rng, 80)
    config = demo_config(Path("unused"), *TWO_TOOLS)
    run, search = SnippetRunner(INTERPRETER), FactSearch(facts, config.tools.search)
    misled = 0
    for fact in facts:
        assert search(fact.query).text == fact.text and value_in(fact.text) == fact.value
        assert not any(search(query).succeeded for query in fact.failing_queries)
        misled += sum(search(query).text != fact.text for query in fact.wrong_queries)
    assert misled > 1.4 * len(facts)
    families = fact_families(facts)
    for index in range(300):
        problem = draw(rng, list(families)[index % len(families)], families=families)
        if isinstance(problem, FactProblem):
            value = problem.fact.value
            found = str(value) if problem.code_for is None else run(problem.code_for(value).correct).text
            assert found == str(problem.answer)
    with pytest.raises(ValueError, match="names for entities"):
        make_facts(rng, 100_000)


def test_traces_with_two_tools():
    rng = random.Random(5)
    facts = make_facts(rng, 80)
    families = fact_families(facts)
    config = demo_config(Path("unused"), *TWO_TOOLS)
    tools = DemoTools(SnippetRunner(INTERPRETER), FactSearch(facts, config.tools.search))
    kinds = {}
    sequences = set()
    for index in range(1200):
        problem = draw(rng, list(families)[index % len(families)], families=families)
        messages, kind = trace(rng, problem, tools)
        kinds[kind] = kinds.get(kind, 0) + 1
        names = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        sequences.add((isinstance(problem, FactProblem), *names))
        if kind in ("correct", "retry"):
            assert messages[-1]["content"] == f"The answer is \\boxed{{{problem.answer}}}."
        # Code uses what the search showed, also where that was another entity's number.
        if kind == "correct" and getattr(problem, "code_for", None):
            code = messages[4]["tool_calls"][0]["function"]["arguments"]["code"]
            assert str(value_in(messages[3]["content"])) in code
    assert set(kinds) == {"guess", "correct", "wrong", "retry", "give_up"}
    assert 0.2 < kinds["correct"] / 1200 < 0.35
    assert {(True, "search"), (True, "search", "code_interpreter"), (True, "search", "search")} <= sequences
    assert not any(fact is False and "search" in names for fact, *names in sequences)


def test_two_tools_need_both_in_the_prompt(tmp_path):
    with pytest.raises(ConfigError, match=r"rollout\.multi_turn\.tools"):
        make_demo(demo_config(tmp_path / "data", "demo.variant=two_tools"))
    with pytest.raises(ConfigError, match=r"demo\.entities"):
        make_demo(demo_config(tmp_path / "data", *TWO_TOOLS, "demo.entities=100000"))
