"""Data files, model directories and checkpoints that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from conversion import hf_to_mcore, mcore_to_hf
from megatron_retool.config import load_config
from megatron_retool.data.demo import make_demo
from tests.bad_inputs.conftest import Refused

Weights = dict[str, np.ndarray]
SMALL = (
    "pretrain_rows=64 sft_rows=64 sft_val_rows=8 train_rows=16 val_rows=4 hidden_size=32 num_layers=1 vocab_size=384"
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo") / "data"
    sandbox = ["tools.code_interpreter.error_style=last_line", "tools.code_interpreter.print_last_expression=false"]
    sizes = [f"demo.{setting}" for setting in SMALL.split()]
    return make_demo(load_config(None, [f"demo.directory={directory}", *sizes, *sandbox]))


def table(**columns: list[Any]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


QUESTION = [{"role": "user", "content": "What is 1 + 1?"}]
TRUTH = [{"ground_truth": "2"}]
GOOD = table(prompt=[QUESTION], data_source=["a"], reward_model=TRUTH)

DATA = [
    ("empty.parquet", b"", "empty.parquet"),
    ("text.parquet", b"this is not Parquet\n" * 50, "text.parquet"),
    ("cut.parquet", GOOD[: len(GOOD) // 2], "cut.parquet"),
    ("rows.parquet", table(prompt=[], reward_model=[]), "rows.parquet"),
    ("columns.parquet", table(text=["1 + 1"], result=["2"]), "columns.parquet", "prompt"),
    ("types.parquet", table(prompt=[3], data_source=["a"], reward_model=TRUTH), "types.parquet", "prompt"),
    ("roles.parquet", table(prompt=[[{"who": "me"}]], data_source=["a"], reward_model=TRUTH), "roles.parquet"),
    ("truth.parquet", table(prompt=[QUESTION], data_source=["a"]), "truth.parquet"),
    ("lines.jsonl", b'{"prompt": "a"\n', "lines.jsonl"),
    ("latin.jsonl", '{"prompt": "größe", "answer": 1}\n'.encode("latin-1"), "latin.jsonl"),
    ("nothing.jsonl", b"", "nothing.jsonl"),
    ("list.jsonl", b"[1, 2]\n", "list.jsonl"),
    ("table.csv", b"prompt,answer\na,b\n", "table.csv"),
]


@pytest.mark.parametrize("case", DATA, ids=[case[0] for case in DATA])
def test_prompt_files(case: tuple[Any, ...], refused: Refused, demo: Path, tmp_path: Path) -> None:
    name, content, *words = case
    (tmp_path / name).write_bytes(content)
    refused(["evaluate", f"model.path={demo}/model", f"data.val_files={name}"], *words)


@pytest.mark.parametrize("files", ["gone.parquet", ".", "[]"])
def test_prompt_files_that_are_none(files: str, refused: Refused, demo: Path) -> None:
    words = ["data.val_files"] if files == "[]" else [files]
    refused(["train", f"model.path={demo}/model", f"data.val_files={files}"], *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["bad.parquet"]),
        (table(prompt=["a"]), ["bad.parquet", "messages"]),
        (table(messages=[[]]), ["bad.parquet"]),
        (table(messages=["text"]), ["bad.parquet"]),
        (table(messages=[[{"role": "nobody", "content": "a"}]]), ["bad.parquet", "no assistant message"]),
    ],
)
def test_conversations(content: bytes, words: list[str], refused: Refused, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(content)
    arguments = ["sft", "learner.world_size=1", f"model.path={demo}/model", "sft.stages=[{train_files: bad.parquet}]"]
    refused(arguments, *words)


def test_a_model_without_configuration(refused: Refused, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(GOOD)
    (tmp_path / "model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (demo / "model" / name).exists():
            (tmp_path / "model" / name).write_bytes((demo / "model" / name).read_bytes())
    files = ["data.train_files=data.parquet", "data.val_files=data.parquet"]
    refused(["train", "model.path=model", *files], "model", "config.json")


def test_a_layout_that_does_not_divide_the_model(refused: Refused, demo: Path) -> None:
    layout = ["learner.world_size=3", "learner.tensor_model_parallel_size=3"]
    for command in ("train", "sft"):
        refused([command, f"model.path={demo}/model", *layout], "learner.tensor_model_parallel_size=3")


def test_megatron_weights_that_are_not_there(refused: Refused, demo: Path) -> None:
    refused(["train", f"model.path={demo}/model", "model.mcore_path=gone"], "model.mcore_path=gone", "hf_to_mcore.py")


def with_config(demo: Path, directory: Path, **keys: Any) -> Path:
    """The demo's model without weights, other keys in its config.json."""
    directory.mkdir()
    for file in (demo / "model").iterdir():
        if file.suffix != ".safetensors" and file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    known = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**known, **keys}))
    return directory


DAMAGED: list[tuple[str, Any, str]] = [
    ("config.json", "{", "config.json is not valid JSON"),
    ("config.json", {"hidden_size": "big"}, 'hidden_size="big" is not a positive integer'),
    ("config.json", {"rope_parameters": 5}, "rope_parameters=5 is no mapping"),
    ("config.json", {"architectures": "Qwen2ForCausalLM"}, "architectures='Qwen2ForCausalLM' is no list"),
    ("tokenizer.json", "{}", "tokenizer.json is not that of a tokenizer"),
    ("tokenizer.json", None, "model.tokenizer_path"),
    ("tokenizer_config.json", "[]", "tokenizer_config.json is not that of a tokenizer"),
    ("chat_template.jinja", "{% for x in %}", "the chat template in chat_template.jinja is no Jinja template (line 1"),
    ("config.json", {"num_hidden_layers": -2}, "num_hidden_layers=-2 is not a positive integer"),
]


@pytest.mark.parametrize(
    ("command", "case"),
    [*(("train", case) for case in DAMAGED)]
    + [(command, DAMAGED[number]) for command in ("evaluate", "serve", "chat", "sft") for number in (1, 5)],
)
def test_damaged_files_of_a_model(
    command: str, case: tuple[str, Any, str], refused: Refused, demo: Path, tmp_path: Path
) -> None:
    name, content, words = case
    directory = with_config(demo, tmp_path / "model", **content if isinstance(content, dict) else {})
    (directory / "model.safetensors").write_bytes((demo / "model" / "model.safetensors").read_bytes())
    if isinstance(content, str):
        (directory / name).write_text(content)
    elif content is None:
        (directory / name).unlink()
    named = str(directory) if command in ("serve", "chat") else f"model.path={directory}"
    stage = [f"sft.stages=[{{train_files: {demo}/sft.parquet}}]"] if command == "sft" else []
    refused([command, named, *stage], words)


WEIGHTS: list[tuple[str, Callable[[Weights], object], str]] = [
    ("a tensor is missing", lambda tensors: tensors.pop("model.norm.weight"), "has no tensor model.norm.weight"),
    (
        "a tensor has another shape",
        lambda tensors: tensors.update({"model.norm.weight": np.ones(3, np.float32)}),
        "model.norm.weight has shape [3], and config.json implies [32]",
    ),
    ("a layer is missing", lambda tensors: _without_layer(tensors), "more tensors, which config.json's qwen2 with 1 l"),
]


def _without_layer(tensors: Weights) -> None:
    for name in [name for name in tensors if ".layers.0." in name]:
        del tensors[name]


@pytest.mark.parametrize("command", ["train", "evaluate", "serve", "chat", "sft"])
@pytest.mark.parametrize("case", WEIGHTS, ids=[case[0] for case in WEIGHTS])
def test_weights_that_are_not_those_of_the_configuration(
    command: str, case: tuple[str, Callable[[Weights], object], str], refused: Refused, demo: Path, tmp_path: Path
) -> None:
    """SGLang would serve them, with values that it makes up."""
    _, change, words = case
    directory = with_config(demo, tmp_path / "model")
    tensors = load_file(demo / "model" / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    named = str(directory) if command in ("serve", "chat") else f"model.path={directory}"
    stage = [f"sft.stages=[{{train_files: {demo}/sft.parquet}}]"] if command == "sft" else []
    refused([command, named, *stage], words)


@pytest.mark.parametrize("command", ["train", "evaluate", "serve", "chat", "sft"])
def test_a_model_that_was_fetched_without_weights(command: str, refused: Refused, demo: Path, tmp_path: Path) -> None:
    directory = with_config(demo, tmp_path / "model")
    named = str(directory) if command in ("serve", "chat") else f"model.path={directory}"
    stage = [f"sft.stages=[{{train_files: {demo}/sft.parquet}}]"] if command == "sft" else []
    refused([command, named, *stage], "no weights (*.safetensors)", "fetch them")


EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_models_that_sglang_serves_otherwise_than_they_are(refused: Refused, demo: Path, tmp_path: Path) -> None:
    tied = with_config(demo, tmp_path / "tied", **EXPERTS, tie_word_embeddings=True)
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "layer_types": None}
    windowed = with_config(demo, tmp_path / "windowed", **mistral, sliding_window=64)
    for command in ("train", "evaluate", "plan", "pipeline demo.enable=false data.train_files=[] data.val_files=[]"):
        place = ["--gpus", "H100x8"] if command == "plan" else []
        words = ["tied", "tie_word_embeddings=true", "Qwen3MoeForCausalLM", "save_pretrained"]
        refused([*command.split(), *place, f"model.path={tied}"], *words)
        words = ["windowed", "sliding_window=64", "MistralForCausalLM", "data.max_response_length"]
        refused([*command.split(), *place, f"model.path={windowed}"], *words)


def test_what_cannot_replay_routing(refused: Refused, demo: Path, tmp_path: Path) -> None:
    train = ["train", f"model.path={demo}/model"]
    refused([*train, "learner.routing_replay=old_log_probs"], "learner.routing_replay=old_log_probs", "qwen2", "none")
    experts = with_config(demo, tmp_path / "experts", **EXPERTS, tie_word_embeddings=False)
    (experts / "pytorch_model.bin").touch()
    train = ["train", f"model.path={experts}", "rollout.replay_dir=stored"]
    refused(train, "rollout.replay_dir=stored", "step_000001.parquet is not there")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "step_000001.parquet").write_bytes(table(prompt_ids=[[1]], response_ids=[[2]]))
    words = ["learner.routing_replay=rollout", "step_000001.parquet", "rollout.replay_dir=stored", "old_log_probs"]
    refused([*train, "learner.routing_replay=rollout"], *words)


CONFIGURATIONS = [
    ("no file", None, "config.json"),
    ("not JSON", "{", "config.json"),
    ("nothing", "{}", "config.json"),
    ("another family", json.dumps({"model_type": "bert", "architectures": ["BertModel"]}), "bert"),
]


@pytest.mark.parametrize("case", CONFIGURATIONS, ids=[case[0] for case in CONFIGURATIONS])
def test_model_directories(case: tuple[Any, ...], refused: Refused, tmp_path: Path) -> None:
    _, content, *words = case
    (tmp_path / "hf").mkdir()
    if content is not None:
        (tmp_path / "hf" / "config.json").write_text(content)
    refused("--hf-dir hf --mcore-dir out", *words, command=hf_to_mcore.main)


def test_a_model_without_weights(refused: Refused, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_bytes((demo / "model" / "config.json").read_bytes())
    refused("--hf-dir hf --mcore-dir out", "safetensors", command=hf_to_mcore.main)
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused("--hf-dir hf --mcore-dir out", "model.safetensors", command=hf_to_mcore.main)


CONVERSIONS = [
    (hf_to_mcore, "--hf-dir ./gone --mcore-dir out", "gone"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --tp 3", "--tp"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --tp 0", "--tp"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --pp 5", "--pp"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --pp -1", "--pp"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --vpp 0", "--vpp"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --ep 0", "--ep"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --workers 0", "--workers"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --dtype int8", "--dtype"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir there", "there"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir a_file/out", "a_file"),
    (hf_to_mcore, "--hf-dir {model} --mcore-dir out --family gone.py:FAMILY", "gone.py"),
    (mcore_to_hf, "--mcore-dir gone --hf-dir out", "gone"),
    (mcore_to_hf, "--mcore-dir there --hf-dir out", "there"),
    (mcore_to_hf, "--mcore-dir a_file --hf-dir out", "a_file"),
    (mcore_to_hf, "--mcore-dir there --hf-dir out --max-file-bytes 0", "--max-file-bytes"),
]


@pytest.mark.parametrize("case", CONVERSIONS, ids=[f"{case[0].__name__} {case[1]}" for case in CONVERSIONS])
def test_conversions(case: tuple[Any, ...], refused: Refused, demo: Path, tmp_path: Path) -> None:
    module, arguments, *words = case
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    (tmp_path / "a_file").touch()
    refused(arguments.format(model=demo / "model"), *words, command=module.main)
