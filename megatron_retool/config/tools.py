"""Settings of the built-in tools."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative, positive


@dataclass(frozen=True)
class CodeInterpreterConfig:
    url: Any = None
    """An existing SandboxFusion-compatible server, or a list of them; None: the trainer starts one on each node."""
    workers: int = at_least_one(128, maximum=65536)
    """Snippets that run at the same time on one server."""
    memory_limit_mb: int = at_least_one(1024)
    """Memory of each snippet."""
    run_timeout_seconds: float = positive(10.0)
    """For one snippet; then it is killed."""
    port: int = not_negative(0, maximum=65535)
    """Of the servers that the trainer starts; 0: any free port."""
    isolation: str = choice("auto", "namespaces", "bubblewrap", "rlimits")
    """What separates snippets from the host; auto: the strongest that works here."""
    print_last_expression: bool = True
    """The value of a last line that is an expression is printed, as a notebook does."""
    preimport: list[str] = field(default_factory=lambda: ["numpy", "sympy", "scipy", "math"])
    """Modules that are loaded once, so that a snippet's own import takes no time."""
    error_style: str = choice("traceback", "last_line")
    """What the model sees of a failure: the whole traceback, or its last line alone."""
    max_error_characters: int | None = at_least_one(None)
    """A longer error is cut off; None: only max_output_characters holds."""
    max_output_characters: int = at_least_one(20000)
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
    top_k: int = at_least_one(3)
    """Passages that a search returns."""
    show_ranks: bool = True
    """Write [1], [2], … before the passages."""


@dataclass(frozen=True)
class ToolsConfig:
    code_interpreter: CodeInterpreterConfig = field(default_factory=CodeInterpreterConfig)
    """The Python sandbox."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The search in a corpus."""

    def check(self) -> None:
        """Raise ConfigError where a URL is none."""
        url = self.code_interpreter.url
        urls = [url] if isinstance(url, str) else url
        if url is not None and not (isinstance(urls, list) and urls and all(isinstance(each, str) for each in urls)):
            raise ConfigError(f"tools.code_interpreter.url={url!r} must be a URL, a list of URLs, or null")
