"""BM25 over a text corpus that fits in memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s

from megatron_retool.errors import InputError


class CorpusError(InputError):
    """A corpus file cannot be read. The message names the file, and the row or column at fault."""


@dataclass(frozen=True)
class Passage:
    """One entry of a corpus."""

    id: str
    text: str
    title: str = ""


@dataclass(frozen=True)
class Hit:
    """A passage found, with its BM25 score."""

    passage: Passage
    score: float


class BM25Index:
    """Ranks passages against a query (Robertson's BM25 with Lucene's idf, k1 = 1.5, b = 0.75; English stop words).

    Titles are searched along with the texts.
    """

    def __init__(self, passages: Sequence[Passage]) -> None:
        if not passages:
            raise CorpusError("the corpus has no passages")
        self._passages = list(passages)
        self._by_id: dict[str, list[Passage]] = {}
        for passage in self._passages:
            self._by_id.setdefault(passage.id, []).append(passage)
        tokens = self._tokenize([f"{passage.title}\n{passage.text}" for passage in self._passages])
        # The NumPy backend: compiling the other one would take longer than most corpora take to search.
        self._index = bm25s.BM25(backend="numpy")
        self._index.index(tokens, show_progress=False)

    @classmethod
    def from_file(cls, path: str | Path) -> BM25Index:
        """Index a .parquet or .jsonl file with the columns text, and optionally id and title.

        Raises:
            CorpusError: the file is missing, is neither, or a row has no text.
        """
        return cls(read_passages(path))

    def document(self, identity: str) -> list[Passage]:
        """The passages of that id in the corpus's order; none where it is unknown."""
        return self._by_id.get(identity, [])

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, query: str, k: int) -> list[Hit]:
        """The ``k`` best passages, best first; fewer where fewer share a word with ``query``."""
        tokens = self._tokenize([query])
        if not tokens[0]:
            return []
        result, scores = self._index.retrieve(tokens, k=min(k, len(self._passages)), show_progress=False)
        pairs = zip(result[0].tolist(), scores[0].tolist(), strict=True)
        return [Hit(self._passages[index], score) for index, score in pairs if score > 0]

    @staticmethod
    def _tokenize(texts: list[str]) -> list[list[str]]:
        return bm25s.tokenize(texts, stopwords="en", return_ids=False, show_progress=False)


def read_passages(path: str | Path) -> list[Passage]:
    """Read a corpus file; see ``BM25Index.from_file``."""
    path = Path(path)
    if not path.is_file():
        raise CorpusError(f"search corpus {path} does not exist")
    if path.suffix == ".parquet":
        rows = _read_parquet(path)
    elif path.suffix in (".jsonl", ".json"):
        rows = _read_json_lines(path)
    else:
        raise CorpusError(f"search corpus {path}: expected .parquet or .jsonl, not {path.suffix!r}")
    passages = []
    for number, row in enumerate(rows):
        text = row.get("text")
        if not isinstance(text, str):
            raise CorpusError(f"search corpus {path}, row {number}: column 'text' must be a string, found {text!r:.60}")
        identity = row.get("id")
        passages.append(Passage(str(number if identity is None else identity), text, str(row.get("title") or "")))
    if not passages:
        raise CorpusError(f"search corpus {path} has no rows")
    return passages


def _read_parquet(path: Path) -> list[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        if "text" not in names:
            raise CorpusError(f"search corpus {path} has no column 'text'; it has {', '.join(names)}")
        wanted = [name for name in ("id", "text", "title") if name in names]
        return pyarrow.parquet.read_table(path, columns=wanted).to_pylist()
    except pyarrow.ArrowException as error:
        raise CorpusError(f"search corpus {path} is not a readable parquet file: {error}") from error


def _read_json_lines(path: Path) -> list[dict[str, Any]]:
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise CorpusError(f"search corpus {path}, line {number + 1} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise CorpusError(f"search corpus {path}, line {number + 1} is not a JSON object")
            rows.append(row)
    return rows
