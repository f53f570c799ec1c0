"""Routing replay: in a mixture of experts, tokens go through the experts that were chosen for them before.

Only the choice is replayed. The gates are the router's own: its probabilities of the replayed experts, so that
the gradient reaches the router. For tokens whose row is missing the router chooses as ever.

Megatron's TopKRouter asks the object in its attribute ``router_replay`` in place of its top-k; ``LayerReplay`` stands
there, one for each layer. Megatron's own ``RouterReplay`` is not used: it knows no missing rows, keeps all routers of a
process in one list (a reference policy's too), and takes a caller that forgets to switch it between the forward and the
backward pass at its word, with wrong gradients.

A layer that is computed again in the backward pass must go through the experts of the same micro-batch. Autograd's
checkpoints run a layer without a gradient first, which tells that it will come again; the rows then wait in a queue,
for the schedules of pipeline parallelism take micro-batches backward in the order of their forward passes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from conversion.model.architecture import Architecture
from megatron_retool.algorithms.means import Mean
from megatron_retool.config import AlgorithmConfig, ConfigError, LearnerConfig
from megatron_retool.errors import InputError
from megatron_retool.learner.expert_groups import ExpertChoice, TopK
from megatron_retool.learner.micro_batch import MicroBatch
from megatron_retool.routed_experts import ExpertArray, RoutedExperts, expert_dtype, is_missing, missing_expert
from megatron_retool.trajectory import TrajectoryBatch

Int64Array = npt.NDArray[np.int64]

_REDUCED_BYTES = 64 * 2**20
"""Of recorded experts that ranks exchange at a time."""


@dataclass(frozen=True)
class _Choice:
    """One layer's experts for the tokens of a micro-batch: [t, k], and bool [t, 1] where they are known."""

    experts: Tensor
    known: Tensor
    differing: Tensor | None
    """int32 [t]: counts up where the router would have chosen otherwise; None: it is not asked for."""


class LayerReplay(ExpertChoice):
    """What the router of one layer asks for its experts, in place of its own top-k.

    Between passes the router chooses for itself.

    Args:
        layer: its place among the layers that choose experts.
        own: the router's own choice, where that is not Megatron's.
    """

    def __init__(self, layer: int, own: TopK | None = None) -> None:
        super().__init__(own)
        self.layer = layer
        self.recorded: Tensor | None = None
        """int64 [t, k]: the router's own choice in the forward pass that was recorded last."""
        self._choice: _Choice | None = None
        self._recording = False
        self._learning = False
        self._waiting: deque[_Choice] = deque()

    @property
    def waiting(self) -> int:
        """Micro-batches that this layer will see again in the backward pass."""
        return len(self._waiting)

    def clear(self) -> None:
        """Forget what a pass, complete or not, has left."""
        self._choice = self.recorded = None
        self._recording = self._learning = False
        self._waiting.clear()

    @contextlib.contextmanager
    def replaying(self, choice: _Choice) -> Iterator[None]:
        """A micro-batch's forward pass through the layer; what comes after it computes the layer again."""
        self._choice, self._learning = choice, torch.is_grad_enabled()
        try:
            yield
        finally:
            self._choice = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A forward pass in which the router chooses for itself and ``recorded`` keeps what."""
        self._recording = True
        try:
            yield
        finally:
            self._recording = False

    def choose(
        self, scores: Tensor, own: Callable[[], tuple[Tensor, Tensor]], *, limited: bool
    ) -> tuple[Tensor, Tensor]:
        """The experts to replay where there are some, else the router's own.

        Raises:
            RuntimeError: the layer is computed again for a micro-batch that it has not seen, or for another one.
        """
        if self._choice is None and not self._learning:
            own_scores, own_experts = own()
            if self._recording:
                self.recorded = own_experts
            return own_scores, own_experts
        choice = self._take_choice()
        if len(choice.experts) != len(scores):
            raise RuntimeError(f"layer {self.layer} routes {len(scores)} tokens by {len(choice.experts)} rows")
        with torch.no_grad():
            own_scores, own_experts = own()
            experts = torch.where(choice.known, choice.experts.to(torch.int64), own_experts)
        taken = scores.gather(1, experts)
        if self._choice is not None and choice.differing is not None:
            if limited:
                different = (experts.sort(1).values != own_experts.sort(1).values).any(1)
            else:  # The smallest score tells the sets apart: no other k experts have that of the k best, but for ties.
                different = taken.detach().amin(1) != own_scores.amin(1)
            choice.differing.add_(different)
        return taken, experts

    def _take_choice(self) -> _Choice:
        if self._choice is None:
            if not self._waiting:
                raise RuntimeError(f"layer {self.layer} is computed again more often than it was computed")
            return self._waiting.popleft()
        if self._learning and not torch.is_grad_enabled():
            self._waiting.append(self._choice)
        return self._choice


class RoutingPass:
    """One forward pass, or forward and backward pass, over a batch's micro-batches; a context around it.

    Its figures and what it recorded are the same on every rank, and every rank must ask for them.

    Args:
        replay: of the models that the pass goes through.
        batch: the whole batch.
        column: the experts to replay; None: routers choose for themselves.
        record: keep what routers choose (only without ``column``).
        count: count how often routers would have chosen otherwise.
    """

    def __init__(
        self,
        replay: RoutingReplay,
        batch: TrajectoryBatch,
        *,
        column: RoutedExperts | None = None,
        record: bool = False,
        count: bool = False,
    ) -> None:
        self._replay = replay
        self._column = column
        self._count = count
        lengths = batch.total_lengths.astype(np.int64)
        self._tokens = int(lengths.sum())
        self._starts = np.cumsum(lengths) - lengths
        self._differing: dict[int, tuple[MicroBatch, Int64Array, Tensor]] = {}
        """By the id of a micro-batch (held, so that no other object takes it): which tokens this rank's routers see of
        it, and what their layers count of each."""
        self._duplicates: list[Int64Array] = []
        self._flips: npt.NDArray[np.int32] | None = None
        self._recorded: ExpertArray | None = None
        if record:
            shape = (self._tokens, replay.num_layers, replay.experts_per_token)
            recorded: Any = np.zeros(shape, expert_dtype(replay.num_experts))
            self._recorded = recorded

    def __enter__(self) -> RoutingPass:
        self._replay.clear()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        left = self._replay.waiting
        self._replay.clear()
        if error is None and left:
            raise RuntimeError(f"{left} layers of micro-batches were to be computed again in the backward pass")

    @contextlib.contextmanager
    def through(self, layers: Sequence[LayerReplay], micro_batch: MicroBatch) -> Iterator[None]:
        """The forward pass of a model chunk with these layers (in their order) over a micro-batch.

        Raises:
            ValueError: the column names experts that the model has not, or one twice for a token.
        """
        if not layers or (self._column is None and self._recorded is None):
            yield
            return
        positions = self._replay.share_of(micro_batch.token_positions)
        if micro_batch.duplicates is not None:
            self._duplicates.append(micro_batch.duplicates)
        first, count = layers[0].layer, len(layers)
        with contextlib.ExitStack() as stack:
            if self._column is None:
                for layer in layers:
                    stack.enter_context(layer.recording())
                yield
                self._keep(layers, positions)
                return
            rows = cut_rows(self._column, self._starts, positions, first, count)
            self._replay.check(rows)
            device = self._replay.device
            experts = torch.from_numpy(rows).to(device)
            known = experts[:, 0, :1] != missing_expert(rows.dtype)
            differing = self._counted(micro_batch, positions) if self._count else None
            for place, layer in enumerate(layers):
                stack.enter_context(layer.replaying(_Choice(experts[:, place], known, differing)))
            yield

    @property
    def records(self) -> bool:
        """Whether ``recorded`` has an answer."""
        return self._recorded is not None

    @property
    def counts(self) -> bool:
        """Whether ``flips`` has an answer."""
        return self._count and self._column is not None

    def metrics(self) -> dict[str, float]:
        """routing_replay/missing_rows, differing_tokens, differing_token_layers, over all ranks; empty unless counted.

        Padding is no token here; the two shares of what differs are of tokens with rows. A collective.
        """
        if not self._count:
            return {}
        if self._column is None:
            return {"routing_replay/missing_rows": 1.0}
        flips = self.flips()
        replayed = flips[flips >= 0]
        known = max(len(replayed), 1)
        return {
            "routing_replay/missing_rows": Mean((len(flips) - len(replayed)) / max(len(flips), 1), len(flips)),
            "routing_replay/differing_tokens": Mean((replayed > 0).sum() / known, len(replayed)),
            "routing_replay/differing_token_layers": Mean(
                replayed.sum() / (known * self._replay.num_layers), len(replayed)
            ),
        }

    def flips(self) -> npt.NDArray[np.int32]:
        """Layers whose router would have chosen other experts for a token than it was made to, of all tokens of the
        batch: [sum (P + R)], prompt first in each sequence; -1: its row is missing. A collective."""
        assert self.counts and self._column is not None
        if self._flips is None:
            result = np.zeros(self._tokens, np.int32)
            for _, positions, differing in self._differing.values():
                real = positions >= 0
                result[positions[real]] = differing.cpu().numpy()[real]
            self._copy_to_duplicates(result)
            # A stage of the pipeline knows of its own layers, and whoever has not seen a token has 0 for it.
            self._reduce(result, torch.distributed.ReduceOp.SUM, self._replay.groups_of_layers_and_tokens())
            result[is_missing(cut_rows(self._column, self._starts, np.arange(self._tokens), 0, 1))] = -1
            self._flips = result
        return self._flips

    def recorded(self) -> ExpertArray:
        """What routers chose for all tokens of the batch: [sum (P + R), layers, k]. A collective."""
        result = self._recorded
        assert result is not None
        self._copy_to_duplicates(result)
        if torch.distributed.get_world_size() > 1:
            # Whoever has not seen a token has 0 for it.
            self._reduce(result, torch.distributed.ReduceOp.MAX, [torch.distributed.group.WORLD])
        return result

    def _copy_to_duplicates(self, found: npt.NDArray[Any]) -> None:
        """What is known of a token goes to those in whose place it was computed."""
        for others, computed in self._duplicates:
            found[others] = found[computed]

    def _reduce(self, found: npt.NDArray[Any], how: Any, groups: Iterable[Any]) -> None:
        """``found`` [tokens, ...] over the ranks of each of ``groups`` in turn, in place."""
        groups = list(groups)
        step = max(1, _REDUCED_BYTES // (found[0].size * 4)) if len(found) else 1
        for start in range(0, len(found), step):
            part = torch.from_numpy(found[start : start + step])
            # NCCL has no int16.
            moved = part.to(self._replay.device, part.dtype if part.dtype == torch.uint8 else torch.int32)
            for group in groups:
                torch.distributed.all_reduce(moved, op=how, group=group)
            part.copy_(moved)

    def _counted(self, micro_batch: MicroBatch, positions: Int64Array) -> Tensor:
        """Where the layers of a micro-batch count, in all of its chunks."""
        if id(micro_batch) not in self._differing:
            zeros = torch.zeros(len(positions), dtype=torch.int32, device=self._replay.device)
            self._differing[id(micro_batch)] = micro_batch, positions, zeros
        return self._differing[id(micro_batch)][2]

    def _keep(self, layers: Sequence[LayerReplay], positions: Int64Array) -> None:
        assert self._recorded is not None
        chosen = [layer.recorded for layer in layers]
        rows = torch.stack([each for each in chosen if each is not None], 1)
        rows = rows.to(torch.uint8 if self._recorded.dtype == np.uint8 else torch.int16)
        first, real = layers[0].layer, positions >= 0
        self._recorded[positions[real], first : first + len(layers)] = rows.cpu().numpy()[real]
        for layer in layers:
            layer.recorded = None


class RoutingReplay:
    """``learner.routing_replay`` of one rank: the routers of its models, and a ``RoutingPass`` for each pass.

    The reference policy replays too. Its log-probs are compared with the policy's token by token, and through other
    experts the two would differ by the choice of experts besides by what was learned.

    Args:
        models: ``PackedModel`` chunks of the policy and of the reference, whose routers this installs itself in.
        device: where the models are.

    Raises:
        ConfigError: the model has no experts, or its routers do not ask for a replayed choice.
    """

    def __init__(
        self,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        architecture: Architecture,
        config: TransformerConfig,
        models: Iterable[Any],
        device: torch.device,
    ) -> None:
        self.mode = learner.routing_replay
        check_routers(self.mode, architecture, config)
        self.bypass = algorithm.rollout_correction.bypass_old_log_probs
        self.num_layers = len(architecture.expert_layers)
        """That choose experts; a dense layer has no rows."""
        self.num_experts = int(architecture.num_experts or 0)
        self.experts_per_token = int(architecture.num_experts_per_tok or 0)
        self.device = device
        self.tensor = config.tensor_model_parallel_size if config.sequence_parallel else 1
        self.pipeline = config.pipeline_model_parallel_size
        self._layers: list[LayerReplay] = []
        for model in models:
            model.layer_replays = _stand_in(model, architecture)
            self._layers += model.layer_replays

    @property
    def waiting(self) -> int:
        """Layers of micro-batches that are yet to be computed again."""
        return sum(layer.waiting for layer in self._layers)

    def clear(self) -> None:
        """Forget the experts of the last pass."""
        for layer in self._layers:
            layer.clear()

    def reading(self, batch: TrajectoryBatch, reference: bool) -> RoutingPass:
        """The pass of old (or reference) log-probs: replays, or records where the update is to replay it.

        Raises:
            ValueError: the batch's routed experts are not of this model.
        """
        if self.mode == "old_log_probs" and not reference:
            return RoutingPass(self, batch, record=True)
        return RoutingPass(self, batch, column=self._column(batch), count=not reference)

    def learning(self, batch: TrajectoryBatch, count: bool = False) -> RoutingPass:
        """The pass of an update, which counts where no pass before it has: by itself, or where ``count`` says so.

        Raises:
            ValueError: the batch's routed experts are not of this model.
        """
        count = count or self.bypass or self.mode == "old_log_probs"
        return RoutingPass(self, batch, column=self._column(batch), count=count)

    def share_of(self, positions: Int64Array) -> Int64Array:
        """What this rank's routers see of a micro-batch's tokens: sequence parallelism cuts them into TP runs."""
        if self.tensor == 1:
            return positions
        size = len(positions) // self.tensor
        rank = parallel_state.get_tensor_model_parallel_rank()
        return positions[rank * size : (rank + 1) * size]

    def groups_of_layers_and_tokens(self) -> Iterable[Any]:
        """Process groups whose ranks' routers are of different layers, or see different tokens."""
        if self.pipeline > 1:
            yield parallel_state.get_pipeline_model_parallel_group()
        yield parallel_state.get_data_parallel_group(with_context_parallel=True)
        if self.tensor > 1:
            yield parallel_state.get_tensor_model_parallel_group()

    def check(self, rows: ExpertArray) -> None:
        """Raise ValueError where rows [t, layers, k] name an expert that the model has not, or one twice."""
        unsigned = rows[~is_missing(rows)].view(f"u{rows.itemsize}")
        if unsigned.size and unsigned.max() >= self.num_experts:
            raise ValueError(f"routed_experts names expert {unsigned.max()}, and the model has {self.num_experts}")
        if (unsigned[..., :1] == unsigned[..., 1:]).any():
            raise ValueError("routed_experts has a row that names an expert twice: such a row is not an engine's")

    def _column(self, batch: TrajectoryBatch) -> RoutedExperts | None:
        column = batch.routed_experts
        if column is not None and column.rows.shape[1:] != (self.num_layers, self.experts_per_token):
            layers, k = column.rows.shape[1:]
            raise InputError(
                f"the batch's routed_experts are of {layers} layers with {k} experts for each token, and the model has "
                f"{self.num_layers} with {self.experts_per_token}: they were recorded with another model"
            )
        return column


def _stand_in(model: torch.nn.Module, architecture: Architecture) -> list[LayerReplay]:
    """Take the place of the top-k of a model chunk's routers, but for those of layers for multi-token prediction; its
    layers, in their order."""
    layers = []
    for module in model.modules():
        if isinstance(module, TopKRouter) and not module.is_mtp_layer:
            place = architecture.expert_layers.index(module.layer_number - 1)
            before = module.router_replay
            layers.append(LayerReplay(place, before.own if isinstance(before, ExpertChoice) else None))
            module.router_replay = layers[-1]
    return layers


def check_routers(mode: str, architecture: Architecture, config: TransformerConfig) -> None:
    """Raise ConfigError where the model's routers cannot replay a choice of experts."""
    if not architecture.is_moe:
        raise ConfigError(
            f"learner.routing_replay={mode} needs a mixture of experts, and model.path is a dense "
            f"{architecture.family}: set learner.routing_replay=none"
        )
    if config.moe_router_fusion:
        raise ConfigError(
            f"learner.routing_replay={mode} does not go with moe_router_fusion, whose kernel chooses experts itself"
        )
    if config.moe_router_load_balancing_type == "sinkhorn":
        raise ConfigError(
            f"learner.routing_replay={mode} does not go with moe_router_load_balancing_type=sinkhorn, which does not "
            "choose experts by a top-k"
        )


def cut_rows(column: RoutedExperts, starts: Int64Array, positions: Int64Array, first: int, count: int) -> ExpertArray:
    """Rows [t, count, k] of layers first .. first + count - 1, for tokens of a batch.

    Args:
        column: of the batch.
        starts: int64 [N], where each sequence begins among the batch's tokens.
        positions: int64 [t], tokens of the batch (prompt and response of each sequence, end to end); -1: padding, whose
            row is missing.
    """
    stage = column.rows[:, first : first + count]
    rows = np.full((len(positions), *stage.shape[1:]), missing_expert(stage.dtype), stage.dtype)
    real = positions >= 0
    tokens = positions[real]
    sequences = np.searchsorted(starts, tokens, side="right") - 1
    rows[real] = stage[tokens - starts[sequences] + column.starts[sequences]]
    return rows
