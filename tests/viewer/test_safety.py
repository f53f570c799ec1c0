"""What the viewer must not do, whatever lies in the folder or comes in a request: tell of other files, run what a model
wrote, or fail as a whole over one damaged file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp.test_utils import TestClient, TestServer
from yarl import URL

from run_files.steps import step_path
from run_viewer.answer_cache import PageCache
from run_viewer.server import build_app
from run_viewer.step_pages import files_of_step
from run_viewer.timeline import step_time_page
from tests.viewer.synthetic_run import HOSTILE, make_run

SECRET = "secret-of-another-folder"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("made") / "run", steps=2)


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """Two runs, and beside their folder a file that is nobody's business."""
    for name in ("first", "second"):
        shutil.copytree(made, tmp_path / "runs" / name)
    (tmp_path / "outside").mkdir()
    for name in ("config.yaml", "secret.txt"):
        (tmp_path / "outside" / name).write_text(SECRET)
    return tmp_path / "runs"


def ask(root: Path, *paths: str, method: str = "GET") -> list[tuple[int, str, dict[str, str]]]:
    """(status, body, headers) of each path, sent as it is written."""

    async def run() -> list[tuple[int, str, dict[str, str]]]:
        found = []
        async with TestClient(TestServer(build_app(root))) as client:
            for path in paths:
                async with client.request(method, URL(path, encoded=True), allow_redirects=False) as response:
                    found.append((response.status, await response.text(), dict(response.headers)))
        return found

    return asyncio.run(run())


def answered(root: Path, path: str) -> dict:
    ((status, body, _),) = ask(root, path)
    assert status == 200, body
    return json.loads(body)


def test_no_request_leads_out_of_the_folder(runs: Path):
    outside = runs.parent / "outside"
    (runs / "linked").symlink_to(outside)
    (runs / "first" / "logs").mkdir()
    (runs / "first" / "logs" / "trainer.log").symlink_to(outside / "secret.txt")
    (runs / "stranger").mkdir()
    (runs / "stranger" / "config.yaml").symlink_to(outside / "secret.txt")
    names = [
        "..%2Foutside",
        "%2E%2E%2Foutside",
        "linked",
        str(outside).replace("/", "%2F"),
        "first%2F..%2F..%2Foutside",
    ]
    names += ["stranger", "first%00", "..", "..%5Coutside"]
    paths = [f"/api/runs/{name}" for name in names] + [f"/api/compare?a={name}&b=first" for name in names]
    files = ["../../outside/secret.txt", "..%2F..%2Foutside%2Fsecret.txt", "%2e%2e/%2e%2e/outside/secret.txt"]
    files += [str(outside / "secret.txt"), "%2F" + str(outside / "secret.txt")[1:], "logs/trainer.log", "logs%00"]
    paths += [f"/files/first/{file}" for file in files] + [f"/files/linked/{file}" for file in ("secret.txt",)]
    paths += ["/page/..%2Fserver.py", "/page/../server.py", "/page/server.py", "/page/%2e%2e/server.py"]
    for path, (status, body, _) in zip(paths, ask(runs, *paths), strict=True):
        assert 400 <= status < 500 and SECRET not in body and "build_app" not in body, path
    listed = answered(runs, "/api/runs")
    assert [run["name"] for run in listed["runs"]] == ["first", "second"] and SECRET not in json.dumps(listed)


def test_a_step_that_is_a_link_out_of_the_folder_is_not_read(runs: Path):
    path = runs / "first" / "rollouts" / "step_000001.parquet"
    path.rename(runs.parent / "outside" / path.name)
    path.symlink_to(runs.parent / "outside" / path.name)
    for status, body, _ in ask(
        runs, "/api/runs/first/steps/1", "/api/runs/first/steps/1/0/1", "/api/runs/first/time/1"
    ):
        assert status == 404 and "leads out of" in body, body
    assert answered(runs, "/api/runs/first/steps/2")["groups"]


def test_answers_forbid_scripts_from_elsewhere_and_are_no_markup(runs: Path):
    paths = [
        "/",
        "/page/app.js",
        "/api/runs",
        "/api/runs/first/steps/1",
        "/api/runs/none",
        "/no/such",
        "/files/first/x",
    ]
    for path, (_, _, headers) in zip(paths, ask(runs, *paths), strict=True):
        policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
        assert policy["default-src"] == "'none'" and policy["script-src"] == "'self'", path
        assert headers["X-Content-Type-Options"] == "nosniff"
        if path.startswith("/api"):
            assert headers["Content-Type"].startswith("application/json")
    for method in ("POST", "PUT", "DELETE"):
        assert ask(runs, "/api/runs", method=method)[0][0] == 405


def test_what_a_model_wrote_arrives_as_it_was(runs: Path):
    step = answered(runs, "/api/runs/first/steps/1")
    assert HOSTILE in step["groups"][0]["question"] and step["groups"][0]["responses"][0]["prediction"] == HOSTILE
    assert step["groups"][0]["responses"][0]["why"]["odd"] is None  # NaN, which is no JSON
    response = answered(runs, "/api/runs/first/steps/1/0/1")
    assert HOSTILE in "".join(response["texts"])
    first = answered(runs, "/api/runs/first/steps/1/0/0")
    assert first["columns"]["log_ratio"][5] == "Infinity" and first["columns"]["rejected"][3] == 1
    assert step["groups"][0]["responses"][0]["largest_difference"] == "Infinity"


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    if how == "foreign":
        pq.write_table(pa.table({"a": [1]}), path)
    elif how == "other types":
        table = pq.read_table(path)
        for name in ("group_id", "keep", "loss_mask"):
            if name in table.column_names:
                strings = pa.array(["x"] * len(table))
                table = table.set_column(table.column_names.index(name), name, strings)
        pq.write_table(table, path)
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        share = {"empty": 0.0, "cut": 0.6, "one byte": 1.0}[how]
        kept = bytearray(whole[: int(len(whole) * share)])
        if how == "one byte":
            kept[len(kept) // 3] ^= 0xFF
        path.write_bytes(bytes(kept))


@pytest.mark.parametrize("how", ["empty", "cut", "foreign", "other types", "one byte", "folder"])
def test_a_damaged_step_is_named_and_the_others_are_shown(runs: Path, how: str):
    damage(runs / "first" / "rollouts" / "step_000001.parquet", how)
    damage(runs / "first" / "rollouts" / "step_000002.learner.parquet", how)
    pages = ["steps/1", "steps/1/0/1", "steps/1/search?text=x"]
    for status, body, _ in ask(runs, *(f"/api/runs/first/{page}" for page in pages)):
        # One flipped byte lies in one column: pages without that column are whole.
        assert status == 500 or (how == "folder" and status == 404) or (how == "one byte" and status == 200), body
        assert status == 200 or "step_000001.parquet" in json.loads(body)["error"]
    step = answered(runs, "/api/runs/first/steps/2")
    assert len(step["groups"]) == 4
    if how not in ("folder", "one byte"):
        assert "step_000002.learner.parquet" in " ".join(step["problems"])
        response = answered(runs, "/api/runs/first/steps/2/0/1")
        assert response["length"] > 20 and "step_000002.learner.parquet" in " ".join(response["problems"])
    assert answered(runs, "/api/runs/second/steps/1")["problems"] == []


def test_half_written_metrics_and_settings_are_named_and_the_rest_is_shown(runs: Path):
    with open(runs / "first" / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "rollout/acc/mea')
    (runs / "second" / "config.yaml").write_bytes(b"a: [1,\n\xff")
    found = {run["name"]: run for run in answered(runs, "/api/runs")["runs"]}
    assert "metrics.jsonl" in " ".join(found["first"]["problems"]) and found["first"]["step"] == 2
    assert "config.yaml" in " ".join(found["second"]["problems"])
    assert answered(runs, "/api/runs/second/steps/1")["groups"]
    assert answered(runs, "/api/runs/first/metrics?names=rollout/acc/mean")["metrics"]["rollout/acc/mean"] == [0.5, 1]


def test_an_answer_is_kept_until_its_file_changes_and_within_its_bound(tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("one")
    cache, made = PageCache(most_bytes=10), []

    def answer(name: str, size: int = 4) -> bytes:
        return cache.answer(name, [path], lambda: made.append(name) or name.encode() * size)

    assert answer("a") == answer("a") and made == ["a"]
    path.write_text("longer")
    answer("a"), answer("b"), answer("a")
    assert made == ["a", "a", "b"]
    answer("c"), answer("a")  # the third did not fit beside the others, and "b" had waited longest
    assert made == ["a", "a", "b", "c"]
    answer("b"), answer("d", 11), answer("d", 11)  # one that is larger than the bound is made each time
    assert made == ["a", "a", "b", "c", "b", "d", "d"]
    os.utime(path, (1, 1))
    answer("b")
    assert made[-1] == "b"


def test_a_step_is_read_again_when_one_of_its_files_has_changed(runs: Path):
    """Times are written last, when others may have looked at the step already."""
    run_dir, times = runs / "first", step_path(runs / "first" / "rollouts", 1, "times")
    cache = PageCache()

    def ranks() -> bytes:
        answer = cache.answer(
            "time", files_of_step(run_dir, 1), lambda: json.dumps(step_time_page(run_dir, 1)).encode()
        )
        return json.loads(answer)["ranks"]

    assert ranks() == {}
    times.write_text('{"phases": [], "ranks": {"learner": [2.5]}}')
    assert ranks() == {"learner": [2.5]}
