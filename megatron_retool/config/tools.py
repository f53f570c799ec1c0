"""Settings of the built-in tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.base import ConfigError, choice


@dataclass(frozen=True)
class CodeInterpreterConfig:
    url: Any = None
    """An existing SandboxFusion-compatible server, or a list of them; None: the trainer starts one on each node."""
    workers: int = 128
    """Snippets that run at the same time on one server."""
    memory_limit_mb: int = 1024
    run_timeout_seconds: float = 10.0
    port: int = 0
    """0: any free port."""
    isolation: str = choice("auto", "namespaces", "bubblewrap", "rlimits")
    print_last_expression: bool = True
    preimport: list[str] = field(default_factory=lambda: ["numpy", "sympy", "scipy", "math"])
    error_style: str = choice("traceback", "last_line")
    """What the model sees of a failure: the whole traceback, or its last line alone."""
    max_error_characters: int | None = None
    """A longer error is cut off; None: only max_output_characters holds."""
    max_output_characters: int = 20000
    """A longer result loses its middle, and says so."""
    empty_output_text: str = ""
    """What the model sees when the code prints nothing."""

    @property
    def urls(self) -> list[str]:
        """The existing servers of ``url``; none where the trainer starts its own."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])


@dataclass(frozen=True)
class SearchConfig:
    corpus: str | None = None
    """Parquet or JSONL file with the columns id, text (and optionally title)."""
    top_k: int = 3
    show_ranks: bool = True
    """Write [1], [2], … before the passages."""


@dataclass(frozen=True)
class ToolsConfig:
    code_interpreter: CodeInterpreterConfig = field(default_factory=CodeInterpreterConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    def check(self) -> None:
        """Raise ConfigError where a URL is none."""
        url = self.code_interpreter.url
        urls = [url] if isinstance(url, str) else url
        if url is not None and not (isinstance(urls, list) and urls and all(isinstance(each, str) for each in urls)):
            raise ConfigError(f"tools.code_interpreter.url={url!r} must be a URL, a list of URLs, or null")
