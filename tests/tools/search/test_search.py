from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_retool.config import ConfigError, SearchConfig, ToolsConfig
from tools.registry import ToolRegistry
from tools.search.index import BM25Index, CorpusError, Passage, read_passages
from tools.tool import TrajectoryInfo

ROWS = [
    {"id": "a", "title": "Gaussian elimination", "text": "Row operations bring a matrix into echelon form."},
    {"id": "b", "title": "Prime numbers", "text": "A prime has exactly two divisors. Primes are infinitely many."},
    {"id": "c", "title": "Paris", "text": "The capital of France lies on the Seine."},
    {"id": "d", "title": "Lyon", "text": "A city in France where the Rhône meets the Saône."},
]


@pytest.fixture(params=["parquet", "jsonl"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"corpus.{request.param}"
    if request.param == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "\n")
    return path


def test_best_passage_comes_first(corpus: Path) -> None:
    index = BM25Index.from_file(corpus)
    assert len(index) == 4
    assert index.search("What is the capital of France?", 2)[0].passage.id == "c"
    assert [hit.passage.id for hit in index.search("prime divisors", 3)] == ["b"], "no word, no hit"
    assert index.search("gaussian", 1)[0].passage.id == "a", "titles count"
    scores = [hit.score for hit in index.search("France Seine capital", 4)]
    assert scores == sorted(scores, reverse=True) and len(scores) == 2


@pytest.mark.parametrize("query", ["", "?!", "the of", "zyxwv", "日本語"])
def test_queries_without_a_hit(corpus: Path, query: str) -> None:
    assert BM25Index.from_file(corpus).search(query, 3) == []


def test_scores_are_bm25() -> None:
    """Robertson's formula with Lucene's idf, by hand."""
    import math

    texts = ["apple banana", "apple apple cherry date", "banana"]
    hits = BM25Index([Passage(str(i), text) for i, text in enumerate(texts)]).search("apple", 3)
    idf = math.log(1 + (3 - 2 + 0.5) / (2 + 0.5))
    average = 7 / 3

    def score(frequency: int, length: int) -> float:
        return idf * frequency / (frequency + 1.5 * (1 - 0.75 + 0.75 * length / average))

    expected = {"0": score(1, 2), "1": score(2, 4)}
    assert {hit.passage.id: hit.score for hit in hits} == pytest.approx(expected, rel=1e-5)


def test_tool_returns_top_k(corpus: Path) -> None:
    async def scenario() -> None:
        config = ToolsConfig(search=SearchConfig(corpus=str(corpus), top_k=1))
        async with ToolRegistry.from_config(config, ["search"]) as registry:
            tools = await registry.open(TrajectoryInfo(0, 0))
            result = await tools.call("search", {"query": "capital of France"})
            assert (result.status, result.text) == ("ok", "[1] Paris\nThe capital of France lies on the Seine.")
            assert (await tools.call("search", {"query": "zyxwv"})).text == "No passage matches."
            assert (await tools.call("search", {"q": "x"})).status == "bad_arguments"
        plain = dataclasses.replace(config, search=dataclasses.replace(config.search, show_ranks=False))
        async with ToolRegistry.from_config(plain, ["search"]) as registry:
            tools = await registry.open(TrajectoryInfo(0, 0))
            result = await tools.call("search", {"query": "capital of France"})
            assert result.text == "Paris\nThe capital of France lies on the Seine."

    asyncio.run(scenario())


def test_rows_without_id_and_title(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert read_passages(path) == [Passage("0", "one"), Passage("1", "two")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("c.txt", b"x", "parquet or .jsonl"),
        ("c.jsonl", b"", "no rows"),
        ("c.jsonl", b'{"text": "a"}\n{"text"\n', "line 2"),
        ("c.jsonl", b"[1]\n", "line 1"),
        ("c.jsonl", b'{"text": "a"}\n{"body": "a"}\n', "row 1.*'text'"),
        ("c.parquet", b"PAR1 but not really", "parquet"),
    ],
)
def test_bad_corpora(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        BM25Index.from_file(path)
    assert str(path) in str(caught.value)
    with pytest.raises(ConfigError, match="tools.search.corpus"):
        ToolRegistry.from_config(ToolsConfig(search=SearchConfig(corpus=str(path))), ["search"])


def test_parquet_without_text(tmp_path: Path) -> None:
    path = tmp_path / "c.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), path)
    with pytest.raises(CorpusError, match="no column 'text'; it has body"):
        BM25Index.from_file(path)
