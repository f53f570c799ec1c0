"""What an engine is, whatever it is made of: ``rollout.engine.backend`` names a class that follows ``Engine``.

An engine is met in three processes, and ``Engine`` is the one object that makes its part for each of them:

| part | process | does |
|---|---|---|
| ``EngineServer`` | a Ray actor on its node | owns what is started and ended: ``start``, ``stop`` |
| ``EngineClient`` | the driver, in its event loop | ``generate``, ``abort``, ``healthy``, ``sleep``, ``wake`` |
| ``WeightSync`` | the learner's rank 0, without an event loop | ``push``: new weights into all engines |

The three know each other by the server's ``base_url``, a string that only the engine itself reads. Making a part does
nothing else: it starts, opens and loads nothing. Everything above (router, rollout manager, branching, GPU phases,
deployment) speaks to these protocols.

Every failure of a request is one of four exceptions, so that a caller can tell an engine that is gone
(``EngineUnavailable``) from one that is slow (``EngineTimeout``), from a request it refuses (``EngineRejected``) and
from an engine that broke while it worked (``EngineFailed``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from megatron_retool.config import SamplingConfig
from megatron_retool.errors import OperationError
from megatron_retool.routed_experts import ExpertArray

if TYPE_CHECKING:
    import torch


class EngineError(OperationError):
    """An engine cannot be started or reached. The message says which, why and what to do."""


class EngineStartError(EngineError):
    """The engine ended or stayed silent while it was starting."""


class EngineClientError(OperationError):
    """A request to an engine failed.

    Attributes:
        engine: its base URL.
        reason: the message without the engine and the call.
    """

    def __init__(self, engine: str, reason: str, call: str = "") -> None:
        super().__init__(f"engine {engine}: {call + ': ' if call else ''}{reason}")
        self.engine = engine
        self.reason = reason


class EngineUnavailable(EngineClientError):
    """No answer from the engine's address, even after the retries."""


class EngineTimeout(EngineClientError):
    """The engine did not answer in time."""


class EngineRejected(EngineClientError):
    """The engine refused the request: the request is wrong, and a retry would be too."""


class EngineFailed(EngineClientError):
    """The engine answered with an error of its own or with something that is no answer."""


@dataclass(frozen=True)
class GenerateResult:
    """What one request sampled. The lists have one entry for each output token.

    ``log_probs`` are natural logarithms of the probability after the temperature, and before top_p, top_k and min_p
    cut the distribution unless ``filtered_log_probs`` was asked for. ``weight_versions`` has the version that sampled
    each token: they differ within one call where weights were swapped while the request was held.
    """

    output_ids: list[int]
    log_probs: list[float]
    weight_versions: list[int]
    finish_reason: Literal["stop", "length", "abort"]
    matched_stop: int | str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    top_log_probs: list[list[float]] | None = None
    """Log-probs of the most likely tokens at each position, where they were asked for."""
    top_ids: list[list[int]] | None = None
    """The ids of these tokens, from engines that say them."""
    routed_experts: ExpertArray | None = None
    """[n, layers, k]: rows of the tokens from ``routed_experts_start`` on, where they were asked for. The last sampled
    token has none: it was no input yet."""
    routed_experts_start: int | None = None
    """The token that the first row is of; None: the trajectory's first without one."""


@dataclass(frozen=True)
class StopConditions:
    """When the engine ends a turn: on a token id, or on a string (needs the tokenizer in the engine). What ended it is
    part of the answer's tokens.

    Attributes:
        end_of_sequence: also on the token that the model's config.json names.
    """

    token_ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()
    end_of_sequence: bool = True


@dataclass(frozen=True)
class Grammar:
    """What the sampled text must be.

    Attributes:
        kind: json_schema, or structural_tag (XGrammar's).
        text: as JSON.
    """

    kind: Literal["json_schema", "structural_tag"]
    text: str


@dataclass(frozen=True)
class Steering:
    """What a served model's callers ask of the distribution beyond ``SamplingConfig``. Log-probs are of the result.

    Engines whose class has ``steers = True`` are asked, and no others; a grammar also needs their tokenizer. A run
    steers nothing: the learner's log-probs are those of the policy itself.

    Attributes:
        penalties: frequency_penalty, presence_penalty, repetition_penalty.
    """

    grammar: Grammar | None = None
    penalties: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateRequest:
    """One request: what to continue, how to sample, when to stop. A temperature of 0 takes the most likely token."""

    input_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingConfig
    stop: StopConditions = field(default_factory=StopConditions)
    seed: int | None = None
    """Of the draws; the engine mixes the token's position into it."""
    top_log_probs: int = 0
    filtered_log_probs: bool = False
    """Take the probabilities after top_p, top_k and min_p: the distribution that was sampled from."""
    routed_experts_start: int | None = None
    """The first token whose routed experts are wanted; None: of no token."""
    steering: Steering = field(default_factory=Steering)
    adapter: str | None = None
    """Name of a loaded adapter (``AdapterClient``) to sample with; None: the policy, which is the engine's model, and
    with learner.lora.sync=adapter its newest adapter."""

    @property
    def wants_filtered(self) -> bool:
        """Whether that distribution is asked for and differs from the one before the filters."""
        sampling = self.sampling
        filtered = sampling.top_p < 1.0 or sampling.top_k > 0 or sampling.min_p > 0.0
        return self.filtered_log_probs and filtered and sampling.temperature > 0.0


@dataclass(frozen=True)
class RankedText:
    """What the model holds of a given text, at temperature 1.

    Attributes:
        log_probs: [n - 1], of every token but the first, given those before it.
        likeliest: [n] of (id, log-prob), the likeliest first: for each token but the first, and for the one that would
            follow the text.
    """

    log_probs: list[float]
    likeliest: list[list[tuple[int, float]]]


@dataclass(frozen=True)
class ScoreRequest:
    """What is asked about a given text, at temperature 1.

    Attributes:
        input_ids: n tokens, at least two.
        start: the first token whose log-prob is asked for, given those before it; 1 to n - 1.
        likeliest: how many of the likeliest tokens of each of these n - start places; 0: none.
        targets: for each of these places the ids whose log-probs are asked for beside the text's own; None: none.
        adapter: of ``GenerateRequest``.
    """

    input_ids: Sequence[int]
    start: int = 1
    likeliest: int = 0
    targets: Sequence[Sequence[int]] | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError where the places are not the text's."""
        count = len(self.input_ids)
        if not 1 <= self.start < count:
            raise ValueError(f"start={self.start}: the text has {count} tokens: name one of 1 to {count - 1}")
        if self.targets is not None and len(self.targets) != count - self.start:
            raise ValueError(
                f"targets={len(self.targets)} lists: the text has {count - self.start} places from {self.start} on: "
                "give a list for each"
            )


@dataclass(frozen=True)
class ScoredText:
    """The answer to a ``ScoreRequest``; one element for each place.

    Attributes:
        log_probs: of the text's own tokens.
        likeliest: (id, log-prob), the likeliest first.
        targets: log-probs of the ids that were given, in their order.
    """

    log_probs: list[float]
    likeliest: list[list[tuple[int, float]]]
    targets: list[list[float]]


class Memory(StrEnum):
    """What an engine holds on its GPUs, for ``EngineClient.sleep`` and ``wake``."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class EnginePart:
    """What runs on one node, of an engine that has GPUs of several.

    Attributes:
        rank: of the node, from 0, which is the one that serves.
        count: of nodes.
        address: host:port of the first node, where the parts meet.
    """

    rank: int
    count: int
    address: str


class EngineServer(Protocol):
    """Owns what runs on the engine's node. Its methods may block; one owner calls them, one after another."""

    @property
    def base_url(self) -> str:
        """Where clients and weight syncs find the engine; known once it has started."""

    def start(self) -> None:
        """Return when the engine can generate. After ``stop`` it may be called again.

        Raises:
            EngineStartError: nothing is left running.
        """

    def stop(self) -> None:
        """End everything that was started. Safe to call at any time."""


class PartServer(EngineServer, Protocol):
    """Owns what runs on one node of an engine that has several."""

    def is_alive(self) -> bool:
        """Whether it runs. Where one part does not, all are stopped."""


class EngineClient(Protocol):
    """Speaks to one engine, from one event loop. An asynchronous context manager that closes it."""

    base_url: str

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_start: Callable[[str], None] | None = None,
        deadline_seconds: float | None = None,
    ) -> GenerateResult:
        """Sample until a stop condition, the length limit, or an abort (then the result is partial).

        Args:
            on_start: called with the id of every attempt at the request; ``abort`` takes it.
            deadline_seconds: after that time the request is aborted and what it has so far is returned.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """

    async def abort(self, request_id: str) -> None:
        """End one request, which returns what it has with finish_reason "abort". An unknown id is no error."""

    async def weight_version(self) -> int:
        """Version of the weights that the next token is sampled with; 0 are those it was started with."""

    async def healthy(self, timeout_seconds: float = 10.0) -> bool:
        """Whether the engine generates."""

    async def sleep(self, memory: Sequence[Memory]) -> None:
        """Give up GPU memory, once requests that were aborted have ended. Weights need not survive."""

    async def wake(self, memory: Sequence[Memory]) -> None:
        """Take back what ``sleep`` gave up; weights are undefined until the next push."""

    async def close(self) -> None:
        """Close the connections."""

    async def __aenter__(self) -> EngineClient: ...

    async def __aexit__(self, *exception: object) -> None: ...


class ScoringClient(Protocol):
    """An ``EngineClient`` that can also score a text. An engine of your own may leave it out: it is not compared with
    the learner at the first weight sync then."""

    async def score(self, input_ids: Sequence[int]) -> list[float]:
        """log-prob of every token but the first, given those before it, at temperature 1; nothing is left in a cache.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """


@runtime_checkable
class RankingClient(Protocol):
    """An ``EngineClient`` that can also say which tokens it would rather have seen. An engine of your own may leave it
    out: a served model then gives no log-probs of a prompt."""

    async def rank(self, input_ids: Sequence[int], count: int) -> RankedText:
        """The text's log-probs with the ``count`` (at least 1) likeliest tokens of each place.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """


class AdapterClient(Protocol):
    """An ``EngineClient`` whose engine computes low-rank adapters (LoRA) beside its model, as many as are loaded. An
    engine of your own may leave it out."""

    async def load_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter under a name of its own; other requests continue meanwhile.

        Args:
            directory: PEFT's files (adapter_config.json, adapter_model.safetensors), where the engine sees them. They
                may go when this returns.

        Raises:
            EngineRejected: the name is loaded, or the files are not an adapter of this model or of too large a rank.
            EngineUnavailable, EngineTimeout, EngineFailed
        """

    async def unload_adapter(self, name: str) -> None:
        """Give the name and its memory back, once no request uses it any more; new ones are refused at once.

        Raises:
            EngineRejected: the name is not loaded.
            EngineUnavailable, EngineTimeout, EngineFailed
        """


class ProfilingClient(Protocol):
    """An ``EngineClient`` whose engine can record what it does. An engine of your own may leave it out."""

    async def start_profile(self, directory: Path, name: str, record_shapes: bool, with_stack: bool) -> None:
        """Record from now on; the engine's ranks write traces whose names begin with ``name`` into ``directory``.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """

    async def stop_profile(self) -> None:
        """Return when the traces are written.

        Raises:
            EngineUnavailable, EngineTimeout, EngineRejected, EngineFailed
        """


@dataclass(frozen=True)
class SyncReport:
    """What one push did."""

    version: int
    tensors: int
    bytes: int
    seconds: float
    verified_tensors: int = 0
    all_bytes: int = 0
    """Of the tensors as they are, where what travels may be less; 0: the same."""

    @classmethod
    def together(cls, reports: Sequence[SyncReport]) -> SyncReport:
        """Of senders that worked side by side, each for engines of its own."""
        return cls(
            reports[0].version,
            reports[0].tensors,
            sum(report.bytes for report in reports),
            max(report.seconds for report in reports),
            sum(report.verified_tensors for report in reports),
            sum(report.all_bytes for report in reports),
        )

    def metrics(self) -> dict[str, float]:
        """weight_sync/* metrics."""
        return {
            "weight_sync/seconds": self.seconds,
            "weight_sync/gigabytes": self.bytes / 1e9,
            "weight_sync/gigabytes_per_second": self.bytes / 1e9 / max(self.seconds, 1e-9),
            "weight_sync/verified_tensors": float(self.verified_tensors),
            "weight_sync/sent_share": self.bytes / self.all_bytes if self.all_bytes else 1.0,
        }


class WeightSync(Protocol):
    """One way of new weights into a fixed set of engines. It runs in the learner's rank that sends them."""

    engines: list[str]
    """Base URLs."""

    def push(self, buckets: Iterable[list[tuple[str, torch.Tensor]]], version: int) -> SyncReport:
        """Send ``buckets`` of (Hugging Face name, full tensor) to every engine as weight version ``version``.

        Every parameter must be in exactly one bucket. When this returns, every engine samples with ``version``, and
        requests in flight continue with it.

        Raises:
            WeightSyncError: naming the engines at fault, which are then started again.
        """

    def close(self) -> None:
        """Give up connections and shared memory."""


class Engine(Protocol):
    """Makes the parts of the run's engines, in whichever process: called with the Config and backend_kwargs."""

    def server(
        self,
        index: int,
        *,
        model_path: str,
        host: str,
        log_file: Path,
        tokenizer: bool,
        weights_from_sync: bool,
        gpu_ids: Sequence[str] | None,
    ) -> EngineServer:
        """The server of engine ``index`` of rollout.engine.count, not started yet.

        Args:
            model_path: Hugging Face directory.
            host: address of this node that the others reach.
            log_file: for what it prints; a restart appends.
            tokenizer: requests have stop strings.
            weights_from_sync: a push comes before the first request.
            gpu_ids: CUDA devices that it may use, its own first; None leaves the environment as it is.

        An engine whose class has ``spans = True`` may have GPUs of several nodes. Then one server (``PartServer``) is
        made on each of them, with one more argument, ``part`` (``EnginePart``); all start at the same time, and the
        first one serves.
        """

    def client(self, base_url: str) -> EngineClient:
        """A client of the engine at ``base_url``, not connected yet."""

    def weight_sync(self, base_urls: Sequence[str]) -> WeightSync:
        """A way of new weights from the learner into the engines at ``base_urls``, not connected yet."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An ``Engine`` whose clients have to know which version of the policy engines have, as those of SGLang do with
    learner.lora.sync=adapter. An engine of your own may leave it out."""

    async def serve(self, version: int, urls: Sequence[str]) -> None:
        """A push of ``version`` to the engines at ``urls`` is complete: new requests get it, and what no request uses
        any more goes."""

    def restarted(self, url: str) -> None:
        """The engine at ``url`` is a new one."""
