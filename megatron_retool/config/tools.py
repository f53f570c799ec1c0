"""Settings of the built-in tools."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from megatron_retool.config.base import ConfigError, at_least_one, choice, not_negative, positive

_HOST = re.compile(r"\.?[\w-]+(\.[\w-]+)*")


@dataclass(frozen=True)
class CodeInterpreterConfig:
    """The Python sandbox."""

    url: Any = None
    """An existing SandboxFusion-compatible server, or a list of them; None: the trainer starts one on each node."""
    workers: int = at_least_one(128, maximum=65536)
    """Snippets that run at the same time on one server."""
    memory_limit_mb: int = at_least_one(1024)
    """Memory of each snippet."""
    run_timeout_seconds: float = positive(10.0)
    """For one snippet; then it is killed."""
    session: bool = False
    """Variables live from call to call of a response, in a process of its own with these limits for its whole life.
    Does not go with rollout.partial and rollout.branching."""
    max_sessions: int | None = at_least_one(None, maximum=65536)
    """Sessions at a time on one server that the trainer starts, each of which holds a worker; null: half of workers."""
    session_idle_seconds: float = positive(3600.0)
    """A session to which no call comes for so long is ended."""
    port: int = not_negative(0, maximum=65535)
    """Of the servers that the trainer starts; 0: any free port."""
    isolation: str = choice("auto", "namespaces", "bubblewrap", "rlimits")
    """What separates snippets from the host; auto: the strongest that works here."""
    print_last_expression: bool = True
    """The value of a last line that is an expression is printed, as a notebook does."""
    preimport: list[str] = field(default_factory=lambda: ["numpy", "sympy", "scipy", "math"])
    """Modules that are loaded once, so that a snippet's own import takes no time."""
    error_style: str = choice("traceback", "last_line")
    """What the model sees of a failure: the whole traceback, or only its last line."""
    max_error_characters: int | None = at_least_one(None)
    """A longer error is cut off; None: only max_output_characters holds."""
    max_output_characters: int = at_least_one(20000)
    """A longer result loses its middle, and says so."""
    hide_addresses: bool = False
    """<function f at 0x7f3a5c1b2e50> becomes <function f at 0x0> for the model: the number is another in every run.
    trainer.deterministic sets it."""
    empty_output_text: str = ""
    """What the model sees when the code prints nothing."""

    @property
    def urls(self) -> list[str]:
        """The existing servers of ``url``; none where the trainer starts its own."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])


@dataclass(frozen=True)
class SearchServiceConfig:
    """How tools.search and tools.read_page speak to servers, where tools.search.backend is not local."""

    base_url: str | None = None
    """Of the search service; null: the backend's own, where it has one."""
    api_key_env: str | None = None
    """Environment variable that holds the service's key; null: the backend's own, such as SERPER_API_KEY."""
    timeout_seconds: float = positive(20.0, maximum=3600)
    """For one answer of a server."""
    retries: int = not_negative(3, maximum=100)
    """Further attempts where a server is out of reach, too busy (status 429) or broken (5xx)."""
    requests_per_second: float | None = positive(None, maximum=1_000_000)
    """At most, of this run, pages included; null: no limit."""
    cache_dir: str | None = None
    """Directory in which found passages and pages are kept, for other runs too; null: none are."""
    cache_days: float | None = positive(None)
    """Age after which what is kept is asked for again; null: never."""


@dataclass(frozen=True)
class SearchConfig:
    """The search tool."""

    backend: str = "local"
    """local (BM25 in a corpus), serper, bing, brightdata, retriever, or package.module:Class or path/to/file.py:Class
    of a SearchBackend (docs/extending.md)."""
    backend_kwargs: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of that class, such as {zone: serp_api1}."""
    corpus: str | None = None
    """local: parquet or JSONL file with the columns id, text (and optionally title)."""
    top_k: int = at_least_one(3)
    """Passages that a search returns."""
    show_ranks: bool = True
    """Write [1], [2], … before the passages."""
    show_sources: bool = False
    """Write each passage's URL, or its id in the corpus, before it: read_page takes it."""
    service: SearchServiceConfig = field(default_factory=SearchServiceConfig)
    """The servers of the other backends."""


@dataclass(frozen=True)
class ReadPageConfig:
    """The tool read_page: a page of the web, or a document of the corpus, as tools.search.backend has it."""

    max_characters: int = at_least_one(8000)
    """A longer page is cut off, and says so."""
    max_bytes: int = at_least_one(2_000_000)
    """What is read of a page at most, before HTML becomes text."""
    max_redirects: int = not_negative(5, maximum=100)
    """Redirections that are followed, each checked like the first address."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Hosts whose pages, and those of whose subdomains, may be read; empty: every public one."""
    allow_private_addresses: bool = False
    """Read pages of hosts with private, loopback or link-local addresses too: of everything that this machine reaches,
    services without a password and a cloud's metadata included."""


@dataclass(frozen=True)
class ToolsConfig:
    """Settings of the built-in tools."""

    code_interpreter: CodeInterpreterConfig = field(default_factory=CodeInterpreterConfig)
    """The Python sandbox."""
    search: SearchConfig = field(default_factory=SearchConfig)
    """The search, in a corpus or in the web."""
    read_page: ReadPageConfig = field(default_factory=ReadPageConfig)
    """Reading what the search found."""

    def check(self) -> None:
        """Raise ConfigError where a URL or a host is none, or settings exclude each other."""
        for host in self.read_page.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(f"tools.read_page.allowed_hosts: {host!r} must be a host's name, as in wikipedia.org")
        service = self.search.service.base_url
        if service is not None:
            parts = urlsplit(service)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ConfigError(
                    f"tools.search.service.base_url={service!r} must be a URL such as https://google.serper.dev"
                )
        url = self.code_interpreter.url
        urls = [url] if isinstance(url, str) else url
        if url is not None and not (isinstance(urls, list) and urls and all(isinstance(each, str) for each in urls)):
            raise ConfigError(f"tools.code_interpreter.url={url!r} must be a URL, a list of URLs, or null")
