"""The viewer's server: what it answers of a run, how it says what is wrong, and what it keeps to itself."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import ClientSession
from aiohttp.test_utils import TestServer

from run_viewer.server import PAGE, build_app
from tests.viewer.conftest import HOSTILE

STEP = "/api/runs/run/steps/7"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self):
        return json.loads(self.body)


def ask(root: Path, *paths: str, method: str = "GET", host: str = "127.0.0.1", any_name: bool = False) -> list[Answer]:
    """Each path as it is: a client library would tidy its dots."""

    async def one(port: int, path: str) -> Answer:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"{method} {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        first, *lines = head.decode().split("\r\n")
        return Answer(int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body.decode())

    async def all_of_them() -> Sequence[Answer]:
        async with TestServer(build_app(root, any_name=any_name)) as server:
            assert server.port is not None
            return [await one(server.port, path) for path in paths]

    return list(asyncio.run(all_of_them()))


def test_a_step_is_answered_by_groups(run_dir):
    (answer,) = ask(run_dir.parent, STEP)
    five, six = answer.json["groups"]
    assert (five["group_id"], five["question"], five["ground_truth"]) == (5, "What is 6 * 7?", "42")
    assert five["trained"] and not six["trained"]
    first, second = five["responses"]
    assert (first["index"], first["reward"], first["accuracy"], first["prediction"]) == (0, -1, 0, HOSTILE)
    assert (first["tool_statuses"], first["failed_calls"], first["finish_reason"]) == (["timeout"], 1, "stop")
    # keep is 0 throughout; the learner's log-probs are 0, the engine's -0.1 and -0.2.
    assert first["masked_share"] == 1
    assert [round(each["largest_difference"], 6) for each in (first, second)] == [0.1, 0.2]
    assert six["responses"][0]["largest_difference"] is None


def test_a_tokenizer_that_comes_later_is_found(run_dir):
    """A run is looked at while it begins: neither the tokenizer's absence nor an answer without it is kept."""

    async def texts() -> list[str]:
        async with TestServer(build_app(run_dir.parent)) as server:
            return [await one_text(server), await come(server)]

    async def one_text(server: TestServer) -> str:
        async with ClientSession() as client, client.get(server.make_url(f"{STEP}/5/1")) as answer:
            return "".join((await answer.json())["texts"])

    async def come(server: TestServer) -> str:
        (run_dir.parent / "later").rename(run_dir / "tokenizer")
        return await one_text(server)

    (run_dir.parent / "model").rename(run_dir.parent / "later")
    before, after = asyncio.run(texts())
    assert before.startswith("⟨") and after == f"Let me see {HOSTILE}\nGrüße 東京<|im_end|>"


def test_a_response_is_answered_token_by_token(run_dir):
    trained, dropped = (answer.json for answer in ask(run_dir.parent, f"{STEP}/5/1", f"{STEP}/6/0"))
    assert "".join(trained["texts"]) == f"Let me see {HOSTILE}\nGrüße 東京<|im_end|>"
    assert trained["prompt"] == "a prompt\n" and trained["length"] == len(trained["ids"]) == len(trained["texts"])
    assert {len(column) for column in trained["columns"].values()} == {trained["length"]}
    assert set(trained["kinds"]) <= set(trained["columns"])
    assert trained["columns"]["log_ratio"][0] == pytest.approx(0.2) and "log_ratio" not in dropped["columns"]
    assert trained["turns"] == [{"turn": 0, "start": 0, "end": trained["length"]}]
    assert trained["tool_calls"][0]["seconds"] == 2.5


def test_a_search_finds_responses_by_their_text(run_dir):
    found, none = ask(run_dir.parent, f"{STEP}/search?text=NOT%20looked", f"{STEP}/search?text=elsewhere")
    assert found.json["found"] == [[5, 0], [5, 1], [6, 0], [6, 1]] and none.json["found"] == []


def test_a_run_and_the_folder_of_runs_can_be_shown(run_dir):
    (runs,) = ask(run_dir.parent, "/api/runs")
    assert [run["name"] for run in runs.json["runs"]] == ["run"]
    alone, about = ask(run_dir, "/api/runs", "/api/runs/%2E")
    assert [run["name"] for run in alone.json["runs"]] == ["."] and about.json["steps"] == [7]


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/api/runs/other", 404, "'other' is no run below"),
        ("/api/runs/run/steps/8", 404, "the run has no rollouts/step_000008.parquet: it has 7 to 7"),
        (f"{STEP}/5/9", 404, "step_000007.parquet has no response 5/9"),
        ("/api/runs/run/time/8", 404, "run has neither metrics nor rollouts of step 8"),
        ("/api/compare?a=run&b=", 404, "'' is no run below"),
        ("/api/nothing", 404, "404 Not Found"),
        ("/page/nothing.js", 404, "404 Not Found"),
    ],
)
def test_what_is_not_there_is_named(run_dir, path, status, said):
    (answer,) = ask(run_dir.parent, path)
    assert (answer.status, said in answer.json["error"]) == (status, True), answer.body


def test_a_damaged_file_is_named(run_dir):
    path = run_dir / "rollouts" / "step_000007.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    for answer in ask(run_dir.parent, STEP, f"{STEP}/5/0"):
        assert answer.status == 500 and "step_000007.parquet" in answer.json["error"]


def test_a_damaged_estimate_leaves_the_response_readable(run_dir):
    path = run_dir / "rollouts" / "step_000007.learner.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    step, response = (answer.json for answer in ask(run_dir.parent, STEP, f"{STEP}/5/0"))
    for page in (step, response):
        assert "step_000007.learner.parquet" in " ".join(page["problems"])
    assert response["texts"] and step["groups"][0]["responses"][0]["largest_difference"] is None


def test_nothing_outside_the_folder_is_read(run_dir):
    secret = run_dir.parent / "secret.txt"
    secret.write_text("a secret")
    (run_dir / "link.txt").symlink_to(secret)
    elsewhere = run_dir.parent / "shown"
    elsewhere.mkdir()
    (elsewhere / "way_out").symlink_to(run_dir)
    own, *others = ask(
        run_dir,
        "/files/%2E/config.yaml",
        "/files/%2E/../secret.txt",
        "/files/%2E/%2E%2E/secret.txt",
        "/files/%2E/..%2Fsecret.txt",
        "/files/%2E/link.txt",
        f"/files/%2E/{secret}",
        f"/files/%2E/%2F{str(secret)[1:]}",
        "/files/%2E%2E/secret.txt",
        "/files/%2E/config.yaml%00",
        "/api/runs/%2E%2E",
        "/page/../server.py",
        "/page/%2E%2E%2Fserver.py",
        "/page/..%2F..%2F..%2Fpyproject.toml",
    )
    others += ask(elsewhere, "/api/runs/way_out", "/files/way_out/config.yaml")
    assert own.status == 200 and own.headers["Content-Type"].startswith("text/plain")
    for answer in others:
        assert answer.status in (400, 404) and "a secret" not in answer.body, answer


def test_every_answer_forbids_scripts_from_elsewhere(run_dir):
    answers = ask(run_dir.parent, "/", "/page/app.js", "/api/runs", "/api/runs/other", "/files/run/config.yaml")
    for answer in answers:
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'" and answer.headers["X-Content-Type-Options"] == "nosniff"


def test_a_page_elsewhere_cannot_name_itself_this_machine(run_dir):
    (refused,) = ask(run_dir.parent, "/api/runs", host="evil.example")
    assert refused.status == 403 and "evil.example" in refused.json["error"]
    for answer in ask(run_dir.parent, "/api/runs", host="localhost"):
        assert answer.status == 200
    (wanted,) = ask(run_dir.parent, "/api/runs", host="node7.example", any_name=True)
    assert wanted.status == 200


def test_it_can_be_read_alone(run_dir):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        (answer,) = ask(run_dir.parent, "/api/runs", method=method)
        assert answer.status == 405 and "405" in answer.json["error"]


def test_the_page_loads_what_there_is_and_runs_no_text():
    """Each import leads to a file, no script stands in the page itself, and no module reads text as markup."""
    html = (PAGE / "index.html").read_text()
    assert not re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=", html)
    for path in PAGE.glob("*.js"):
        source = path.read_text()
        for name in re.findall(r"""(?:from|import)\s+"\./([^"]+)\"""", source):
            assert (PAGE / name).is_file(), f"{path.name} imports {name}"
        assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", source)
        assert source.startswith("// ") and len(source.splitlines()) <= 300, path.name


def _as_text(table):
    return table.set_column(table.column_names.index("old_log_probs"), "old_log_probs", pa.array(["x"] * len(table)))


def _without_a_list(table):
    kind = table.schema.field("keep").type
    return table.set_column(table.column_names.index("keep"), "keep", pa.nulls(len(table), kind))


def _twice(table):
    return pa.concat_tables([table.slice(0, 1), table.slice(0, 1)])


@pytest.mark.parametrize("damage", [_as_text, _without_a_list, _twice])
def test_columns_of_another_kind_are_named_on_every_page(run_dir, damage):
    path = run_dir / "rollouts/step_000007.learner.parquet"
    shutil.copytree(run_dir, run_dir.with_name("other"))
    pq.write_table(damage(pq.read_table(path)), path)
    paths = (STEP, f"{STEP}/5/0", "/api/compare?a=run&b=other")
    for where, answer in zip(paths, ask(run_dir.parent, *paths), strict=True):
        assert answer.status == 200, (where, answer.body)
        assert any("step_000007.learner.parquet" in text for text in answer.json["problems"]), where


def test_settings_without_bounds_are_text(run_dir):
    with open(run_dir / "config.yaml", "a", encoding="utf-8") as file:
        file.write("own: {largest: .inf, none: .nan}\n")
    runs, run = ask(run_dir.parent, "/api/runs", "/api/runs/run")
    assert runs.status == 200
    assert run.json["settings"]["own.largest"] == "Infinity" and run.json["settings"]["own.none"] is None


def test_damage_that_nobody_thought_of_is_an_answer_too(run_dir, monkeypatch):
    def fails(*_):
        raise StopIteration

    monkeypatch.setattr("run_viewer.step_pages._token_figures", fails)
    (answer,) = ask(run_dir.parent, STEP)
    assert answer.status == 500 and STEP in answer.json["error"] and "StopIteration" in answer.json["error"]
