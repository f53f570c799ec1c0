"""Prompt sources: what is read, what is refused and how, and the order in which prompts are handed out."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.config import ConfigError, DataConfig, ModelConfig
from megatron_retool.data.files import DataError
from megatron_retool.data.prompt_files import read_prompts
from megatron_retool.data.prompts import PromptRow, PromptSource, ValidationSet, evenly_drawn
from megatron_retool.data.tokenizer import load_tokenizer
from sglang_rollout.environments.base import seed_of
from tools.loading import named_tool
from tools.registry import ToolRegistry
from tools.tool import Tool

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "code_interpreter",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
        },
    }
]


class Toolbox:
    """Every prompt has TOOLS."""

    def schemas(self, extra_info) -> list[dict]:
        return TOOLS


TOOLBOX = Toolbox()


class AnyTools:
    """No tools, whatever a row asks for."""

    def schemas(self, extra_info):
        return []


def verl_row(question: str, answer: str = "1", **columns) -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{question}"},
        **columns,
    }


def write(path, rows: list[dict]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def data_config(*files: str, **settings) -> DataConfig:
    return DataConfig(train_files=list(files), val_files=list(files), **settings)


# ---- order, epochs, resume


def test_batches_cover_each_epoch_and_roll_over(demo_directory, tokenizer):
    source = PromptSource(data_config(str(demo_directory / "train.parquet")), tokenizer, TOOLBOX, seed=3)
    assert len(source) == 60
    drawn = [row for _ in range(5) for row in source.next_batch(24)]
    assert [row.group_id for row in drawn] == list(range(120))
    first, second = [r.uid for r in drawn[:60]], [r.uid for r in drawn[60:]]
    assert len(set(first)) == 60
    assert set(first) == set(second)
    assert first != second
    assert source.epoch == 2
    other = PromptSource(data_config(str(demo_directory / "train.parquet")), tokenizer, TOOLBOX, seed=4)
    assert [r.uid for r in other.next_batch(60)] != first


def test_state_goes_through_json_and_resumes_exactly(demo_directory, tokenizer):
    config = data_config(str(demo_directory / "train.parquet"))
    source = PromptSource(config, tokenizer, TOOLBOX, seed=3)
    source.next_batch(49)
    state = json.loads(json.dumps(source.state_dict()))
    expected = [source.next_batch(16) for _ in range(5)]
    resumed = PromptSource(config, tokenizer, TOOLBOX, seed=3)
    resumed.load_state_dict(state)
    assert [resumed.next_batch(16) for _ in range(5)] == expected


def test_prompts_that_are_given_back_are_drawn_next_and_leave_no_trace(demo_directory, tokenizer):
    config = data_config(str(demo_directory / "train.parquet"))
    source, resumed, other = (PromptSource(config, tokenizer, TOOLBOX, seed=3) for _ in range(3))
    first = source.next_batch(6)
    source.give_back([2, 4, 5])
    assert source.state_dict()["drawn"] == 4 and source.state_dict()["again"] == [2]
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for each in (source, resumed):
        again = each.next_batch(3)
        assert again == [first[2], first[4], first[5]]
    source.give_back([2, 3, 4, 5])
    other.next_batch(2)
    assert source.state_dict() == other.state_dict()
    for wrong in ([2], [99]):
        with pytest.raises(ValueError, match="not one that was drawn"):
            source.give_back(wrong)


def test_state_of_other_data_is_refused(demo_directory, tokenizer):
    config = data_config(str(demo_directory / "train.parquet"))
    state = PromptSource(config, tokenizer, TOOLBOX, seed=3).state_dict()
    with pytest.raises(DataError, match="trainer.seed"):
        PromptSource(config, tokenizer, TOOLBOX, seed=4).load_state_dict(state)
    with pytest.raises(DataError, match="data.train_files"):
        other = data_config(str(demo_directory / "val.parquet"))
        PromptSource(other, tokenizer, TOOLBOX, seed=3).load_state_dict(state)


def test_without_shuffling_the_order_is_the_files(demo_directory, tokenizer):
    source = PromptSource(data_config(str(demo_directory / "train.parquet"), shuffle=False), tokenizer, TOOLBOX, seed=3)
    assert [row.extra_info["index"] for row in source.next_batch(61)] == [*range(60), 0]


# ---- what a row carries


def test_prompt_ids_are_the_chat_template_with_the_tools(demo_directory, tokenizer):
    source = PromptSource(data_config(str(demo_directory / "train.parquet"), shuffle=False), tokenizer, TOOLBOX, seed=0)
    row = source.next_batch(1)[0]
    raw = pq.read_table(demo_directory / "train.parquet").to_pylist()[0]
    expected = tokenizer.apply_chat_template(raw["prompt"], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(row.prompt_ids) == expected
    assert row.prompt_ids == tokenizer(expected).input_ids
    assert row.ground_truth == raw["reward_model"]["ground_truth"]
    assert row.data_source == "demo_integer_math"
    assert row.extra_info["family"] == raw["extra_info"]["family"]
    assert row.messages == raw["prompt"]


def test_validation_set(demo_directory, tokenizer):
    path = str(demo_directory / "val.parquet")
    full = ValidationSet(data_config(path), tokenizer, TOOLBOX)
    assert [row.extra_info["index"] for row in full] == list(range(18))
    assert [row.group_id for row in full] == list(range(18))
    few = ValidationSet(data_config(path, max_val_samples=4), tokenizer, TOOLBOX)
    assert len(few) == 4
    assert {row.uid for row in few} < {row.uid for row in full}
    assert few[0].uid == full[0].uid
    assert few[3].uid == full[17].uid
    quick = ValidationSet(data_config(path, quick_val_samples=4), tokenizer, TOOLBOX).quick
    assert [row.group_id for row in quick] == evenly_drawn(18, 4, 0)
    assert [row.uid for row in quick] == [full[row.group_id].uid for row in quick]
    others = ValidationSet(data_config(path, quick_val_samples=4, quick_val_seed=1), tokenizer, TOOLBOX).quick
    assert [row.group_id for row in others] == evenly_drawn(18, 4, 1)
    with pytest.raises(ConfigError, match="data.val_files"):
        ValidationSet(DataConfig(), tokenizer, TOOLBOX)


def test_overlong_prompts_are_counted_or_refused(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", [verl_row("short"), verl_row("long " * 100), verl_row("brief")])
    source = PromptSource(data_config(path, max_prompt_length=100), tokenizer, TOOLBOX, seed=0)
    assert (len(source), source.counts.overlong, source.counts.rows) == (2, 1, 3)
    assert "1 over data.max_prompt_length" in str(source.counts)
    with pytest.raises(DataError, match=r"p.parquet, row 1, column 'prompt': \d+ tokens"):
        PromptSource(data_config(path, max_prompt_length=100, overlong_prompts="error"), tokenizer, TOOLBOX, seed=0)
    with pytest.raises(DataError, match="none of the 3 rows is left"):
        PromptSource(data_config(path, max_prompt_length=2), tokenizer, TOOLBOX, seed=0)


# ---- layouts


def test_dapo_math_repeats_are_dropped_over_chunks_and_files(tmp_path, tokenizer):
    rows = [verl_row(f"question {index % 700}", str(index % 700)) for index in range(70_000)]
    rows[-1]["reward_model"] = {"ground_truth": "other", "style": "rule-lighteval/MATH_v2"}
    first = write(tmp_path / "dapo-math-17k.parquet", rows)
    second = write(tmp_path / "more.parquet", [verl_row("question 5", "5"), verl_row("new", "2")])
    source = PromptSource(data_config(first, second, shuffle=False), tokenizer, TOOLBOX, seed=0)
    counts = source.counts
    assert (counts.rows, counts.duplicates, counts.conflicting_answers, counts.kept) == (70_002, 69_300, 1, 702)
    batch = source.next_batch(702)
    assert [row.ground_truth for row in batch] == [*map(str, range(700)), "other", "2"]
    assert batch[0].extra_info == {"index": "id-question 0", "ability": "MATH"}
    every, _ = read_prompts([second, second], deduplicate=False)
    assert [prompt.row for prompt in every] == [0, 1, 0, 1]


@pytest.mark.parametrize("differ", ["ground_truth", "extra_info", "tools_kwargs", "data_source"])
def test_rows_that_share_a_prompt_are_different_tasks(tmp_path, tokenizer, differ):
    def row(number: int) -> dict:
        found = {
            "ground_truth": {"reward_model": {"ground_truth": str(number)}},
            "extra_info": {"extra_info": {"index": number}},
            "tools_kwargs": {"extra_info": {"tools_kwargs": json.dumps({"t": {"create_kwargs": {"n": number}}})}},
            "data_source": {"data_source": f"maze/{number}"},
        }[differ]
        return verl_row("Play.", **{"extra_info": {"index": 0}, **found})

    train = write(tmp_path / "t.parquet", [row(number) for number in (*range(20), 3)])
    val = write(tmp_path / "v.parquet", [row(number) for number in range(100, 108)])
    config = DataConfig(train_files=[train], val_files=[val], shuffle=False)
    source, held_out = PromptSource(config, tokenizer, AnyTools(), 0), ValidationSet(config, tokenizer, AnyTools())
    assert (len(source), source.counts.duplicates, len(held_out)) == (20, 1, 8)
    seeds = {seed_of({"uid": each.uid}) for each in source.next_batch(20)}
    assert len(seeds) == 20 and not seeds & {seed_of({"uid": each.uid}) for each in held_out}
    every = PromptSource(dataclasses.replace(config, deduplicate=False), tokenizer, AnyTools(), 0)
    assert len({each.uid for each in every.next_batch(21)}) == 21


def test_a_position_of_a_version_that_told_rows_by_their_messages_goes_on(tmp_path, tokenizer):
    def old_fingerprint(rows: list[PromptRow]) -> str:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(hashlib.sha256(json.dumps(row.messages, sort_keys=True).encode()).hexdigest()[:16].encode())
        return f"{len(rows)}:{digest.hexdigest()[:16]}"

    rows = [verl_row(f"question {index}", str(index)) for index in range(9)]
    config = data_config(write(tmp_path / "p.parquet", [*rows, verl_row("question 2", "other")]), shuffle=False)
    source = PromptSource(config, tokenizer, TOOLBOX, seed=0)
    first = source.next_batch(10)
    for known in (first, first[:9]):
        state = {"drawn": 3, "again": [], "seed": 0, "shuffle": False, "prompts": old_fingerprint(known)}
        source.load_state_dict(state)
        assert len(source) == len(known) and source.next_batch(2) == first[3:5]
        source = PromptSource(config, tokenizer, TOOLBOX, seed=0)


def test_dapo_math_with_bare_questions_and_json_columns(tmp_path):
    rows = [
        verl_row("", prompt="What is 1+1?", reward_model=json.dumps({"ground_truth": "2"})),
        verl_row("", prompt=json.dumps([{"role": "user", "content": "2+2?"}]), reward_model='{"ground_truth": "4"}'),
    ]
    prompts, _ = read_prompts([write(tmp_path / "p.parquet", rows)], instruction="Answer in a box.")
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["What is 1+1?\n\nAnswer in a box.", "2+2?"]
    assert [prompt.ground_truth for prompt in prompts] == ["2", "4"]


@pytest.mark.parametrize(
    ("name", "row", "data_source"),
    [
        ("aime_2024.parquet", {"ID": "2024-I-4", "Problem": "P", "Solution": "S", "Answer": 33}, "aime_2024"),
        ("aime24.parquet", {"id": 60, "problem": "P", "solution": "S", "answer": "033", "year": "2024"}, "aime_2024"),
        ("AIME2025-I.jsonl", {"question": "P", "answer": "70"}, "aime_2025"),
        ("aime_2025/train.parquet", {"problem_idx": 1, "answer": 70, "kind": ["A"], "problem": "P"}, "aime_2025"),
        ("hmmt.json", {"problem": "P", "answer": "70"}, "hmmt"),
    ],
)
def test_competition_layouts(tmp_path, name, row, data_source):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if name.endswith(".parquet"):
        write(path, [row])
    elif name.endswith(".jsonl"):
        path.write_text(json.dumps(row) + "\n")
    else:
        path.write_text(json.dumps([row]))
    [prompt], _ = read_prompts([str(path)], instruction="Box it.")
    assert prompt.data_source == data_source
    assert prompt.messages == [{"role": "user", "content": "P\n\nBox it."}]
    assert prompt.ground_truth == str(row.get("answer", row.get("Answer")))
    assert "Solution" not in prompt.extra_info and "solution" not in prompt.extra_info


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"question": "Q", "answer": "48/2 = <<48/2=24>>24 in May.\n48+24 = 1,072.\n#### 1,072"}, "1072"),
        ({"question": "Q", "answer": "#### -3"}, "-3"),
        ({"problem": "Q", "answer": "see #### above"}, "see #### above"),
        ({"problem": "Q", "solution": "S", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2}, "\\frac{1}{2}"),
    ],
)
def test_the_truth_of_published_layouts(tmp_path, row, truth):
    [prompt], _ = read_prompts([write(tmp_path / "p.parquet", [row])])
    assert prompt.ground_truth == truth and prompt.messages == [{"role": "user", "content": "Q"}]


@pytest.mark.parametrize(
    ("choices", "answer", "letter"),
    [
        (["3", "4", "5"], 1, "B"),
        (["1", "2", "3"], 1, "B"),
        (["1", "2", "3"], "1", "A"),
        (["red", "blue"], "b", "B"),
        (["red", "blue"], "red", "A"),
        (["red", "blue"], "1", "B"),
    ],
)
def test_choices_are_shown_and_the_truth_is_a_letter(tmp_path, choices, answer, letter):
    rows = [{"question": "Q", "options": choices, "answer": answer}]
    [prompt], _ = read_prompts([write(tmp_path / "mmlu.parquet", rows)], instruction="Box it.")
    assert prompt.ground_truth == letter
    lines = prompt.messages[0]["content"].splitlines()
    assert [f"{name}. {text}" for name, text in zip("ABC", choices, strict=False)] == lines[2 : 2 + len(choices)]
    assert lines[-1] == "Box it."


def test_messages_within_a_mapping_are_messages(tmp_path):
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    texts = [json.dumps({"messages": said}), " [ " + json.dumps(said)[1:], '{"a": 1} is what?', "[1, 2] has how many?"]
    rows = [verl_row("q", prompt=text) for text in texts]
    prompts, _ = read_prompts([write(tmp_path / "p.parquet", rows)])
    asked = [{"role": "user", "content": text} for text in texts[2:]]
    assert [prompt.messages for prompt in prompts] == [said, said, *([each] for each in asked)]


def test_columns_that_are_not_read_are_named(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", [verl_row("q") | {"difficulty": 3, "id": "a"}])
    _, counts = read_prompts([path])
    assert sorted(counts.unread) == [f"difficulty of {path}", f"id of {path}"]


def test_aime_in_verls_layout_repeats_each_problem(tmp_path):
    rows = [verl_row(f"AIME {index}", str(index), data_source="math_dapo_aime") for index in range(30)] * 32
    prompts, counts = read_prompts([write(tmp_path / "aime-2024.parquet", rows)])
    assert len(prompts) == 30
    assert counts.duplicates == 930


def test_reasoning_gym(monkeypatch):
    source = "reasoning_gym:chain_sum?size=3&seed=5&min_terms=2&max_terms=2"
    prompts, _ = read_prompts([source], instruction="Box it.")
    again, _ = read_prompts([source], instruction="Box it.")
    assert [prompt.messages for prompt in prompts] == [prompt.messages for prompt in again]
    assert len(prompts) == 3
    for index, prompt in enumerate(prompts):
        question = prompt.extra_info["question"]
        assert prompt.data_source == "reasoning_gym/chain_sum"
        assert prompt.messages[0]["content"] == f"{question}\n\nBox it."
        assert prompt.extra_info["index"] == index and prompt.extra_info["metadata"]["num_terms"] == 2
        first, sign, second = prompt.extra_info["metadata"]["expression"].split()
        assert str(int(first) + int(sign + second)) == prompt.ground_truth
    for refused in ("nothing", "chain_sum?colour=red", "chain_sum?min_terms=0"):
        with pytest.raises(DataError, match="reasoning-gym refuses it"):
            read_prompts([f"reasoning_gym:{refused}"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match="pip install reasoning-gym"):
        read_prompts(["reasoning_gym:chain_sum"])


# ---- bad input: one message naming file, row and column


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"data_source": "x", "reward_model": {"ground_truth": "1"}}], "column 'prompt' is missing; the file has"),
        ([{"prompt": [{"role": "user", "content": "q"}]}], "column 'reward_model' is missing"),
        ([verl_row("q"), verl_row("q", prompt=None)], "row 1, column 'prompt': the prompt is missing"),
        ([verl_row("q"), verl_row("q", prompt=[])], "row 1, column 'prompt': the prompt is empty"),
        ([verl_row("q"), verl_row(" \n")], "row 1, column 'prompt': the prompt is empty"),
        ([verl_row("q", prompt=[{"role": "user", "content": None}, {"role": "user", "content": "q"}])], "no content"),
        ([verl_row("q", prompt=3)], "column 'prompt' has type int64; expected"),
        ([verl_row("q", prompt=["q"])], "column 'prompt' has type list<.*>; expected"),
        ([verl_row("q", prompt=" ")], "row 0, column 'prompt': the prompt is empty"),
        ([verl_row("q"), verl_row("r", None)], "row 1, column 'reward_model': expected a mapping with ground_truth"),
        ([verl_row("q", reward_model="{")], "row 0, column 'reward_model': not valid JSON"),
        ([verl_row("q", extra_info="[1]")], "row 0, column 'extra_info': expected a mapping"),
        ([{"problem": "p", "answer": "1"}, {"problem": "", "answer": "1"}], "row 1, column 'problem': the problem is"),
        ([{"Problem": "p", "Answer": None}], "row 0, column 'Answer': the answer is missing"),
        ([verl_row("q", prompt='[{"role": "user"}]')], "row 0, column 'prompt': expected messages"),
        (
            [
                verl_row("q"),
                verl_row("q", prompt=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]),
            ],
            "row 1, column 'prompt': the last message is the assistant's",
        ),
        ([verl_row("q") | {"images": [b"png"]}], "row 0, column 'images': the row has more than text"),
        ([{"question": "q", "choices": ["a", "b"], "answer": 2}], "row 0: the answer '2' is no choice"),
        ([{"question": "q", "choices": ["a"], "answer": 0}], "row 0: expected 2 to 26 choices"),
    ],
)
def test_bad_rows(tmp_path, rows, message):
    with pytest.raises(DataError, match=f"bad.parquet.*{message}"):
        read_prompts([write(tmp_path / "bad.parquet", rows)])


def test_bad_files(tmp_path):
    with pytest.raises(DataError, match="missing.parquet: the file does not exist"):
        read_prompts([str(tmp_path / "missing.parquet")])
    (tmp_path / "text.csv").write_text("a")
    with pytest.raises(DataError, match="text.csv: expected a .parquet, .jsonl or .json file"):
        read_prompts([str(tmp_path / "text.csv")])
    (tmp_path / "torn.parquet").write_bytes(b"PAR1 no more")
    with pytest.raises(DataError, match="torn.parquet: cannot be read"):
        read_prompts([str(tmp_path / "torn.parquet")])
    empty = pa.Table.from_pylist([verl_row("q")]).slice(0, 0)
    pq.write_table(empty, tmp_path / "empty.parquet")
    with pytest.raises(DataError, match="empty.parquet: no rows"):
        read_prompts([str(tmp_path / "empty.parquet")])
    twice = pa.table([["a"], ["b"], ["c"]], names=["prompt", "reward_model", "prompt"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(DataError, match="twice.parquet: column 'prompt' appears 2 times"):
        read_prompts([str(tmp_path / "twice.parquet")])


def test_template_errors_name_the_row(tmp_path, tokenizer):
    path = write(tmp_path / "p.parquet", [verl_row("fine"), verl_row("bad")])
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = (
        "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    )
    with pytest.raises(DataError, match="p.parquet, row 1: the chat template failed"):
        PromptSource(data_config(path), tokenizer, TOOLBOX, seed=0)


def test_load_tokenizer(demo_directory, tmp_path):
    assert len(load_tokenizer(ModelConfig(path=str(demo_directory / "model")))) == 512
    assert len(load_tokenizer(ModelConfig(path="elsewhere", tokenizer_path=str(demo_directory / "model")))) == 512
    for model, message in (
        (ModelConfig(), "model.path is not set"),
        (ModelConfig(path=str(tmp_path)), "holds no tokenizer"),
        (ModelConfig(path=str(tmp_path / "none")), "does not exist"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_tokenizer(model)


# ---- tools that differ from prompt to prompt


class Lookup(Tool):
    name = "lookup"
    schema = {
        "type": "function",
        "function": {"name": "lookup", "description": "Find.", "parameters": {"type": "object", "properties": {}}},
    }

    async def open(self, trajectory, *, corpus: str = "all") -> str:
        return corpus

    async def call(self, arguments, session, *, top_k: int = 3) -> str:
        return f"{top_k} of {session}"


@pytest.fixture
def two_tools() -> ToolRegistry:
    return ToolRegistry([named_tool(Lookup()), named_tool(Lookup(), "second")])


def with_info(question: str, **extra_info) -> dict:
    return verl_row(question, extra_info={"index": question, **extra_info})


def test_a_prompt_shows_the_tools_that_it_has(tmp_path, tokenizer, two_tools):
    kwargs = {"lookup": {"create_kwargs": {"corpus": "b", "ground_truth": "1"}}}
    rows = [
        with_info("all"),
        with_info("one", tool_selection=["second"]),
        with_info("turned", tool_selection=["second", "lookup"]),
        with_info("settings", need_tools_kwargs=True, tools_kwargs=kwargs),
        with_info("other", tools_kwargs={"second": {"execute_kwargs": {"top_k": 1}}}),
    ]
    path = write(tmp_path / "p.parquet", rows)
    source = PromptSource(data_config(path, shuffle=False), tokenizer, two_tools, seed=0)
    found = {row.messages[-1]["content"]: row for row in source.next_batch(5)}
    lookup, second = two_tools.schemas()
    shown = {"all": [lookup, second], "one": [second], "turned": [second, lookup], "settings": [lookup, second]}
    for question, schemas in shown.items():
        text = tokenizer.apply_chat_template(
            found[question].messages, tools=schemas, tokenize=False, add_generation_prompt=True
        )
        assert found[question].prompt_ids == tokenizer(text).input_ids
    assert found["settings"].extra_info["tools_kwargs"] == kwargs, "without what Arrow adds for the other rows"
    as_text = [with_info("text", tools_kwargs=json.dumps(kwargs))]
    source = PromptSource(data_config(write(tmp_path / "t.parquet", as_text)), tokenizer, two_tools, seed=0)
    assert source.next_batch(1)[0].extra_info["tools_kwargs"] == kwargs


@pytest.mark.parametrize(
    ("extra_info", "said"),
    [
        ({"tool_selection": ["lokup"]}, "tool_selection: there is no tool 'lokup'; .* has lookup, second"),
        ({"tool_selection": "lookup"}, "tool_selection: expected a list of tools' names, found 'lookup'"),
        ({"tools_kwargs": {"web": {"create_kwargs": {"a": 1}}}}, "tools_kwargs: there is no tool 'web'"),
        ({"tools_kwargs": {"lookup": {"init_kwargs": {"a": 1}}}}, "lookup.init_kwargs: expected one of create_kwargs"),
        (
            {"tools_kwargs": {"lookup": {"create_kwargs": {"corpsu": "b"}}}},
            "lookup.create_kwargs.corpsu: the tool's open takes no such argument; it takes corpus",
        ),
        (
            {"tools_kwargs": {"lookup": {"execute_kwargs": {"k": 1}}}},
            "lookup.execute_kwargs.k: the tool's call takes no such argument; it takes top_k",
        ),
        ({"tools_kwargs": {"lookup": {"release_kwargs": {"k": 1}}}}, "close takes no such argument; it takes none"),
        ({"tools_kwargs": {"lookup": {"create_kwargs": [1]}}}, r"create_kwargs: expected a mapping, found \[1\]"),
        ({"tools_kwargs": "{"}, "not valid JSON"),
        ({"need_tools_kwargs": True}, "need_tools_kwargs is set, and tools_kwargs is missing or empty"),
    ],
)
def test_a_row_that_asks_for_what_the_tools_do_not_have(tmp_path, tokenizer, two_tools, extra_info, said):
    path = write(tmp_path / "p.parquet", [with_info("one"), with_info("two", **extra_info)])
    with pytest.raises(DataError, match=rf"p.parquet, row 1, column 'extra_info': .*{said}"):
        ValidationSet(data_config(path), tokenizer, two_tools)
