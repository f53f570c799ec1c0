"""`data prepare` on small files with the columns of each published data set, and on what can be wrong with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_retool.__main__ import main
from megatron_retool.data.prepare import NAMES
from megatron_retool.data.prepare import run as prepare_run
from megatron_retool.data.prepare.aime import aime_problem
from megatron_retool.data.prepare.datasets import DATA_SETS
from megatron_retool.data.prompt_files import read_prompts
from megatron_retool.data.sft_dataset import SFTDataset

INSTRUCTION = "Box it."


def dapo_row(question: str, answer: str = "34", uid: str = "id") -> dict:
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": f"Solve it.\n\n{question}\n\nRemember Answer:", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": uid},
    }


def retool_row(text: str, question: str = "How many?") -> dict:
    asked = (
        f"You may write code.\n*user question:*\nAnswer the problem: {question}\nUse <answer>\n\\boxed{{x}}\n</answer>"
    )
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": text}]}


RETOOL_TEXT = (
    "Count them.\n<code>\n```python\nprint(6 * 7)\n```\n</code>\n<interpreter>\n42\n</interpreter>\nSo it is\n"
    "<answer>\n\\boxed{42}\n</answer>"
)
AIME_2024 = [
    {"ID": f"2024-II-{number}", "Problem": f"Problem {number}?", "Solution": "…", "Answer": 100 + number}
    for number in (4, 12)
]
AIME_2025 = [
    {"id": str(row), "problem": f"Problem {row}?", "answer": f"{row}", "solution": "…", "year": "2025",
     "url": f"https://artofproblemsolving.com/wiki/index.php/2025_AIME_I_Problems/Problem_{row + 1}"}
    for row in range(3)
]  # fmt: skip
GSM8K = [{"question": f"Eggs {row}?", "answer": f"She has {row} <<1+1=2>>.\n#### 1,{row:03}"} for row in range(3)]
MATH_500 = [
    {"problem": "Convert.", "solution": "…", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)", "subject": "Precalculus",
     "level": 2, "unique_id": "test/precalculus/807.json"},
    {"problem": "Define.", "solution": "…", "answer": "p - q", "subject": "Algebra", "level": 5,
     "unique_id": "test/algebra/2.json"},
]  # fmt: skip


def write(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare(name: str, source: Path, output: Path, *more: str) -> dict[str, Any]:
    assert main(["data", "prepare", name, "--from", str(source), "--output", str(output), *more]) == 0
    return json.loads((output / "manifest.json").read_text())


def failure(capsys: pytest.CaptureFixture[str], name: str, source: Path, output: Path) -> str:
    assert main(["data", "prepare", name, "--from", str(source), "--output", str(output)]) == 1
    assert not list(output.glob("*.parquet")) and not list(output.glob(".*"))
    return " ".join(capsys.readouterr().out.split())


def test_the_command_line_names_every_data_set():
    assert tuple(DATA_SETS) == NAMES


def test_dapo_becomes_its_distinct_prompts(tmp_path, capsys):
    rows = [dapo_row(f"What is {number}?", uid=f"uid-{number}") for number in range(40)] * 50
    rows.insert(60, dapo_row("What is 3?", "35"))
    rows += [dapo_row("Which word?", "the answer depends on the weather"), dapo_row("Half?", "\\frac{1}{2}")]
    source = write(tmp_path / "copy/data/dapo-math-17k.parquet", rows)
    manifest = prepare("dapo-math-17k", source.parents[1], tmp_path / "out")
    entry = manifest["outputs"]["train"]
    assert (entry["rows_read"], entry["rows_written"]) == (2003, 41)
    assert entry["dropped"] == {
        "repeats an earlier row": {
            "rows": 1960,
            "first": [f"data/dapo-math-17k.parquet, row {row}" for row in (40, 41, 42)],
        },
        "repeats an earlier row, with another answer": {"rows": 1, "first": ["data/dapo-math-17k.parquet, row 60"]},
        "the grader cannot read the answer": {"rows": 1, "first": ["data/dapo-math-17k.parquet, row 2001"]},
    }
    assert entry["source"][0]["name"] == "data/dapo-math-17k.parquet" and len(entry["source"][0]["sha256"]) == 64
    assert "1,960" in capsys.readouterr().out

    prompts, counts = read_prompts([str(tmp_path / "out/train.parquet")])
    assert (len(prompts), counts.duplicates) == (41, 0)
    third = prompts[3]
    assert third.messages == rows[3]["prompt"] and third.data_source == "math_dapo" and third.ground_truth == "34"
    assert third.extra_info == {"index": 3, "split": "train", "problem_id": "uid-3", "ability": "math"}


def test_the_readers_keys_decide_what_repeats(tmp_path):
    rows = [dapo_row("A?"), dapo_row("A?"), dapo_row("A? ")]
    source = write(tmp_path / "d.parquet", rows)
    manifest = prepare("dapo-math-17k", source, tmp_path / "out")
    assert manifest["outputs"]["train"]["rows_written"] == len(read_prompts([str(source)])[0]) == 2


def test_dapo_as_json_lines(tmp_path):
    source = write(tmp_path / "dapo.jsonl", [dapo_row(f"{row % 7}?") for row in range(10_000)])
    assert prepare("dapo-math-17k", source, tmp_path / "out")["outputs"]["train"]["rows_written"] == 7


@pytest.mark.parametrize(
    ("name", "file", "rows", "expected"),
    [
        ("aime-2024", "aime_2024_problems.parquet", AIME_2024, [("104", "2024-II-4", "II", 4),
                                                               ("112", "2024-II-12", "II", 12)]),
        ("aime-2024", "aime-2024.parquet",
         [{"id": 60, "problem": "A?", "answer": "025", "year": "2024",
           "url": "https://artofproblemsolving.com/wiki/index.php/2024_AIME_II_Problems/Problem_7"}],
         [("025", "2024-II-7", "II", 7)]),
        ("aime-2025", "train.jsonl", AIME_2025, [(str(row), f"2025-I-{row + 1}", "I", row + 1)
                                                 for row in range(3)]),
        ("aime-2025", "aime2025-II.jsonl", [{"question": "A?", "answer": "336^\\circ"}],
         [("336", "2025-II-1", "II", 1)]),
        ("aime-2025", "x.parquet", [{"problem_idx": 17, "problem": "A?", "answer": 5, "problem_type": ["Algebra"]}],
         [("5", "2025-II-2", "II", 2)]),
    ],
    ids=["Maxwell-Jia", "HuggingFaceH4", "yentinglin", "opencompass", "MathArena"],
)  # fmt: skip
def test_aime_keeps_year_and_number(tmp_path, name, file, rows, expected):
    source = write(tmp_path / file, rows)
    manifest = prepare(name, source, tmp_path / "out", "--instruction", INSTRUCTION)
    prompts, _ = read_prompts([str(tmp_path / "out/test.parquet")])
    for prompt, (truth, problem_id, contest, number) in zip(prompts, expected, strict=True):
        assert prompt.ground_truth == truth and prompt.data_source == name.replace("-", "_")
        found = prompt.extra_info
        assert (found["problem_id"], found["contest"], found["problem_number"], found["year"]) == (
            problem_id, contest, number, int(name[-4:]),
        )  # fmt: skip
        assert prompt.messages[0]["content"].endswith(f"?\n\n{INSTRUCTION}")
    assert sum(manifest["outputs"]["test"]["counts"]["contest"].values()) == len(rows)


def test_aime_of_verls_columns_loses_its_copies(tmp_path):
    rows = [dapo_row(f"Problem {row}?", str(row)) for row in range(3)] * 32
    manifest = prepare("aime-2024", write(tmp_path / "aime-2024.parquet", rows), tmp_path / "out")
    assert manifest["outputs"]["test"]["rows_written"] == 3
    prompts, _ = read_prompts([str(tmp_path / "out/test.parquet")])
    assert {prompt.data_source for prompt in prompts} == {"aime_2024"} and prompts[0].extra_info["year"] == 2024


def test_a_problem_whose_place_is_not_told():
    assert aime_problem({"id": 3}, "test.jsonl", 3, 2025) is None
    assert aime_problem({"id": "2025-II-16"}, "test.jsonl", 3, 2025) is None


def test_aime_of_another_year_is_refused(tmp_path, capsys):
    source = write(tmp_path / "a.parquet", AIME_2024)
    said = failure(capsys, "aime-2025", source, tmp_path / "out")
    assert "a.parquet, row 0, column 'Problem': a problem of 2024, not of 2025" in said


def test_gsm8k_takes_the_number_after_the_mark(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"copy/main/{split}-00000-of-00001.parquet", GSM8K + [{"question": "?", "answer": "no mark"}])
        write(tmp_path / f"copy/socratic/{split}-00000-of-00001.parquet", GSM8K * 2)
    manifest = prepare("gsm8k", tmp_path / "copy", tmp_path / "out")
    for split in ("train", "test"):
        prompts, _ = read_prompts([str(tmp_path / f"out/{split}.parquet")])
        assert [prompt.ground_truth for prompt in prompts] == ["1000", "1001", "1002"]
        assert {prompt.extra_info["split"] for prompt in prompts} == {split}
        assert manifest["outputs"][split]["dropped"]["no #### before the answer"]["rows"] == 1
    only = prepare("gsm8k", tmp_path / "copy/main/test-00000-of-00001.parquet", tmp_path / "only")
    assert set(only["outputs"]) == {"test"}


def test_math_500_keeps_level_and_subject(tmp_path):
    manifest = prepare("math-500", write(tmp_path / "test.jsonl", MATH_500), tmp_path / "out")
    assert manifest["outputs"]["test"]["counts"] == {
        "level": {"2": 1, "5": 1},
        "subject": {"Algebra": 1, "Precalculus": 1},
    }
    prompts, _ = read_prompts([str(tmp_path / "out/test.parquet")])
    assert prompts[0].extra_info["problem_id"] == "test/precalculus/807.json" and prompts[0].extra_info["level"] == "2"


def test_retool_sft_becomes_tool_calls(tmp_path, tokenizer):
    multi_turn = {
        "messages": [
            {"role": "user", "content": "Again?", "tool_calls": None},
            {"role": "assistant", "content": "Run.", "tool_calls": [
                {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": "print(1)"}}}]},
            {"role": "tool", "content": "1", "tool_calls": None},
            {"role": "assistant", "content": "\\boxed{1}", "tool_calls": None},
        ]
    }  # fmt: skip
    good = [retool_row(RETOOL_TEXT, f"Question {row}?") for row in range(100)]
    bad = [
        retool_row("Only words: <answer>\\boxed{1}</answer>"),
        retool_row("<code>print(1)</code> and so \\boxed{1}"),
        retool_row("<code>print(1)\n\\boxed{1}"),
        retool_row("<code>print(1)</code><interpreter>1</interpreter> and I stop."),
        good[0],
    ]
    source = tmp_path / "copy"
    write(source / "data/train-00000-of-00001.parquet", good + bad)
    manifest = prepare("retool-sft", source, tmp_path / "out")
    train, val = (manifest["outputs"][name] for name in ("train", "val"))
    assert train["rows_written"] + val["rows_written"] == 100 and 0 < val["rows_written"] < 15
    reasons: dict[str, int] = {}
    for entry in (train, val):
        for reason, dropped in entry["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + dropped["rows"]
    assert reasons == {
        "no code": 1,
        "code without its output": 1,
        "unclosed block": 1,
        "no final answer": 1,
        "repeats an earlier row": 1,
    }
    rows = pq.read_table(tmp_path / "out/train.parquet").to_pylist()
    messages = json.loads(rows[0]["messages"])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (
        messages[0]["content"].startswith("Answer the problem: Question") and "<answer>" not in messages[0]["content"]
    )
    assert messages[1]["content"] == "Count them."
    assert messages[1]["tool_calls"][0]["function"] == {
        "name": "code_interpreter", "arguments": {"code": "print(6 * 7)"},
    }  # fmt: skip
    assert messages[2]["content"] == "42" and messages[3]["content"] == "So it is\n\n\\boxed{42}"
    assert rows[0]["extra_info"]["tool_calls"] == 1
    assert len(SFTDataset([str(tmp_path / "out/train.parquet")], tokenizer, 4096)) == train["rows_written"]

    write(tmp_path / "turns/train.jsonl", [multi_turn] + [
        {"messages": [{**multi_turn["messages"][0], "content": f"{row}?"}, *multi_turn["messages"][1:]]}
        for row in range(60)
    ])  # fmt: skip
    prepare("retool-sft", tmp_path / "turns", tmp_path / "turned")
    rows = pq.read_table(tmp_path / "turned/train.parquet").to_pylist()
    assert json.loads(rows[0]["messages"])[2] == {"role": "tool", "content": "1"}


# ---- again, and interrupted ------------------------------------------------------------------------------------------


def stamps(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}


def test_what_is_there_is_not_made_again(tmp_path):
    copy, out = tmp_path / "copy", tmp_path / "out"
    for split in ("train", "test"):
        write(copy / f"main/{split}.parquet", GSM8K)
    prepare("gsm8k", copy, out)
    before = stamps(out)
    prepare("gsm8k", copy, out)
    assert stamps(out) == before
    write(copy / "main/test.parquet", GSM8K[:2])
    assert prepare("gsm8k", copy, out)["outputs"]["test"]["rows_written"] == 2
    assert stamps(out)["train.parquet"] == before["train.parquet"]
    (out / "train.parquet").write_bytes(b"damaged")
    prepare("gsm8k", copy, out)
    assert len(read_prompts([str(out / "train.parquet")])[0]) == 3


def test_an_interrupted_one_leaves_nothing_half_written(tmp_path, monkeypatch, capsys):
    copy, out = tmp_path / "copy", tmp_path / "out"
    for split in ("train", "test"):
        write(copy / f"main/{split}.parquet", GSM8K)
    (out / "sub").mkdir(parents=True)
    (out / ".test.parquet.partial").write_bytes(b"of a killed command")
    original, written = prepare_run.RowCounts.keep, []

    def keep(self, row):
        written.append(row)
        if len(written) == 5:
            raise KeyboardInterrupt
        original(self, row)

    monkeypatch.setattr(prepare_run.RowCounts, "keep", keep)
    command = ["data", "prepare", "gsm8k", "--from", str(copy), "--output", str(out)]
    assert main(command) != 0
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "sub", "train.parquet"]
    before = stamps(out)["train.parquet"]
    monkeypatch.undo()
    assert main(command) == 0
    assert stamps(out)["train.parquet"] == before and len(read_prompts([str(out / "test.parquet")])[0]) == 3
    assert not (out / ".test.parquet.partial").exists()


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("dapo-math-17k", [{"prompt": "A?"}], "d.parquet: column 'reward_model' is missing; the file has prompt"),
        ("dapo-math-17k", [dapo_row("A?"), {**dapo_row("B?"), "reward_model": None}],
         "d.parquet, row 1, column 'reward_model': expected a mapping with ground_truth"),
        ("dapo-math-17k", [dapo_row("A?"), {**dapo_row("B?"), "prompt": None}],
         "d.parquet, row 1, column 'prompt': the prompt is missing"),
        ("math-500", [{"problem": "A?", "answer": "1"}, {"problem": "B?", "answer": " "}],
         "d.parquet, row 1, column 'answer': the cell is empty"),
        ("gsm8k", [{"question": 1, "answer": "1"}], "d.parquet, row 0, column 'question': has type int64"),
        ("math-500", [{"problem": "A?"}], "d.parquet: column 'answer' is missing"),
        ("aime-2024", [{"answer": "1"}], "column 'problem' is missing"),
        ("retool-sft", [{"messages": [{"role": "user", "content": "A?"}]}],
         "d.parquet, row 0, column 'messages': expected a user's and an assistant's message, found user"),
        ("retool-sft", [{"messages": "no JSON"}], "d.parquet, row 0, column 'messages': not valid JSON"),
        ("gsm8k", [{"question": "A?", "answer": "none"}], "none of 1 rows is left for train.parquet"),
    ],
)  # fmt: skip
def test_bad_rows_are_named(tmp_path, capsys, name, rows, message):
    source = write(tmp_path / "copy/train/d.parquet", rows)
    if name == "gsm8k":
        write(tmp_path / "copy/test/d.parquet", GSM8K)
    assert message in failure(capsys, name, source.parents[1], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_damage_is_placed(tmp_path, capsys):
    table = pa.Table.from_pylist([dapo_row(f"{row}?") for row in range(9000)])
    source = tmp_path / "d.parquet"
    pq.write_table(table, source, row_group_size=3000, write_page_checksum=True, compression="none")
    content = bytearray(source.read_bytes())
    column = pq.ParquetFile(source).metadata.row_group(2).column(1)
    assert column.path_in_schema.startswith("prompt")
    middle = column.dictionary_page_offset + column.total_compressed_size // 2
    content[middle : middle + 8] = bytes(8)
    source.write_bytes(content)
    said = failure(capsys, "dapo-math-17k", source, tmp_path / "out")
    assert "d.parquet, from row " in said and "cannot be read" in said and "(column 'prompt')" in said


def test_sources_that_are_not_there(tmp_path, capsys):
    assert "--from" in failure(capsys, "gsm8k", tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    assert "there is no .parquet" in failure(capsys, "gsm8k", tmp_path / "empty", tmp_path / "out")
    source = write(tmp_path / "part.parquet", GSM8K)
    assert "does not tell whether it is train or test" in failure(capsys, "gsm8k", source, tmp_path / "out")


# ---- the hub ---------------------------------------------------------------------------------------------------------


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download uses, with one data set."""

    files: dict[str, bytes] = {}
    commit = "c" * 40
    requests: list[str] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.requests.append(f"{self.command} {self.path}")
        path = self.path.split("?")[0]
        if path.startswith("/api/datasets/HuggingFaceH4/MATH-500"):
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": "HuggingFaceH4/MATH-500", "sha": self.commit, "siblings": siblings, "tags": []}
            self.answer(json.dumps(body).encode(), {"Content-Type": "application/json"})
            return
        prefix = f"/datasets/HuggingFaceH4/MATH-500/resolve/{self.commit}/"
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and name in self.files:
            self.answer(self.files[name], {"ETag": '"e1"', "X-Repo-Commit": self.commit})
        else:
            self.answer(b"{}", {"X-Error-Code": "RepoNotFound"}, 404)

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    Hub.files = {
        "README.md": b"# MATH-500",
        "test.jsonl": "".join(json.dumps(row) + "\n" for row in MATH_500).encode(),
    }
    Hub.requests = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield Hub
    server.shutdown()
    server.server_close()


def test_from_the_hub_once(tmp_path, hub):
    command = ["data", "prepare", "math-500", "--output", str(tmp_path / "out")]
    assert main(command) == 0
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["source"] == {"where": "HuggingFaceH4/MATH-500", "revision": hub.commit}
    assert manifest["outputs"]["test"]["rows_written"] == 2
    asked = len(hub.requests)
    assert main(command) == 0
    assert len(hub.requests) == asked
    (tmp_path / "out/test.parquet").unlink()
    assert main(command) == 0
    assert sum("GET /datasets" in request for request in hub.requests) == 1, "the cache keeps what was downloaded"


def test_a_hub_without_it(tmp_path, hub, capsys):
    assert main(["data", "prepare", "math-500", "--repo", "nobody/nothing", "--output", str(tmp_path / "out")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "nobody/nothing on the hub: " in said and "name a local copy with --from" in said
    hub.files = {"README.md": b""}
    assert main(["data", "prepare", "math-500", "--output", str(tmp_path / "out")]) == 1
    assert "there is no .parquet" in " ".join(capsys.readouterr().out.split())
