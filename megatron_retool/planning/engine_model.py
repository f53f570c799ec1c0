"""How fast an inference engine decodes and prefills, and how many trajectories it holds.

One decode step of a batch of B sequences with K tokens of context in total reads every weight and every cached key and
value once and multiplies each weight with B rows:

    t(B, K) = fixed + per_sequence B + 2 layers allreduce(B)
              + weight_bytes(B) / (TP bandwidth e_b) + K kv_bytes / (TP bandwidth e_b)
              + B flops_per_token / (TP peak e_c)
              + layers experts_layer                                            (mixture of experts)

The terms add up: measured latencies show no sign of reading and multiplying hiding one another at the batch sizes of a
rollout.  In a mixture of experts a step reads the experts that at least one of the B tokens chose,
E (1 - (1 - k/E)^B) of E on average, and its small matrix products reach a smaller share of the peak.  Prefill is
compute alone.

The constants of the default profile were chosen once for published latencies of vLLM on H100 (ML.ENERGY leaderboard);
docs/planning.md lists the errors, also for the models and tasks that were not looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from conversion.model.architecture import Architecture
from conversion.model.flops import index_pair_flops, pair_flops, token_flops
from megatron_retool.config import EngineConfig
from megatron_retool.planning.hardware import GIB, Accelerator, Machines
from megatron_retool.planning.memory import parameter_count, routed_expert_parameters

MIB = 2**20

SGLANG_DEFAULTS = (
    (20 * GIB, 2048, 8, 8),
    (35 * GIB, 4096, 48, 160),
    (60 * GIB, 4096, 32, 160),
    (160 * GIB, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)
"""Device memory below which they hold, tokens of a prefill (chunked_prefill_size), and the largest decode batch with a
CUDA graph on fewer than 4 GPUs and on more: handle_gpu_memory_settings, sglang/srt/arg_groups/memory_hook.py 0.5.23."""


@dataclass(frozen=True)
class EngineProfile:
    """What a serving stack makes of the hardware.

    Attributes:
        fixed_seconds: launch, sampling and scheduling of one step, whatever the batch.
        per_sequence_seconds: host work for each sequence and step.
        bandwidth_efficiency, compute_efficiency: shares of the peak that kernels reach.
        experts_compute_efficiency: the same for the experts of a mixture while decoding, tens of tokens each.
        experts_layer_seconds: routing and permutation in one such layer.
        allreduce_latency: seconds of a small all-reduce within a node.
        network_latency: seconds more where it goes over nodes.
        keeps_prefix: a trajectory that comes back from a tool finds its keys and values in the cache. False: the
            engine has more trajectories than memory, so that each turn reads the whole context again.
    """

    fixed_seconds: float = 1.5e-3
    per_sequence_seconds: float = 20e-6
    bandwidth_efficiency: float = 0.85
    compute_efficiency: float = 0.6
    experts_compute_efficiency: float = 0.1
    experts_layer_seconds: float = 45e-6
    allreduce_latency: float = 12e-6
    network_latency: float = 20e-6
    keeps_prefix: bool = True


GPU_PROFILE = EngineProfile()
CPU_PROFILE = EngineProfile(fixed_seconds=0.9e-3, per_sequence_seconds=55e-6, compute_efficiency=0.3)
"""SGLang's CPU engine, one core, a model of a million parameters: fitted to the demo's generation on idle cores."""


@dataclass(frozen=True)
class EngineModel:
    """One engine: ``tensor_parallel`` devices that serve one copy of the model.

    Attributes:
        attention_groups: of the devices, each with requests and cache of its own (attention data parallelism).
        draft_bytes: weights of a draft model, all devices together.
        weight_bytes_per_parameter: 2 for bf16, 1 for FP8, 4 for fp32.
        kv_bytes_per_element: of the key-value cache.
        memory_fraction: share of device memory for weights and cache (SGLang's mem_fraction_static).
        max_running: sequences decoded at one time, whatever the memory.
        graph_batch: the engine's own limit of them, up to which it captures CUDA graphs.
        max_cache_tokens: limit of the cache beyond memory; None: memory decides.
        nodes: that its devices are on.
    """

    architecture: Architecture
    accelerator: Accelerator
    tensor_parallel: int = 1
    attention_groups: int = 1
    draft_bytes: float = 0.0
    profile: EngineProfile = GPU_PROFILE
    weight_bytes_per_parameter: float = 2.0
    kv_bytes_per_element: float = 2.0
    memory_fraction: float = 0.85
    max_running: int = 256
    graph_batch: int = 256
    max_cache_tokens: int | None = None
    nodes: int = 1

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        architecture: Architecture,
        machines: Machines,
        max_concurrent: int | None = None,
        profile: EngineProfile | None = None,
    ) -> EngineModel:
        """The engine that ``config`` describes on these machines.

        Args:
            max_concurrent: trajectories that the run gives an engine at a time; None: no limit.
            profile: measured speeds; None: those of the accelerator.
        """
        accelerator = machines.accelerator
        if accelerator.is_cpu:
            width = 4.0 if config.dtype in ("auto", "float32") else 2.0
        else:
            width = 4.0 if config.dtype == "float32" else 2.0
        return cls(
            architecture=architecture,
            accelerator=accelerator,
            tensor_parallel=config.tensor_parallel_size,
            attention_groups=config.attention_data_parallel_size,
            draft_bytes=stored_bytes(config.speculative.draft_model_path),
            profile=profile or (CPU_PROFILE if accelerator.is_cpu else GPU_PROFILE),
            weight_bytes_per_parameter=1.0 if config.quantization == "fp8" else width,
            kv_bytes_per_element=width,
            memory_fraction=config.mem_fraction_static,
            max_running=min(config.max_running_requests, max_concurrent or config.max_running_requests),
            graph_batch=config.max_running_requests,
            max_cache_tokens=config.max_total_tokens,
            nodes=1 if accelerator.is_cpu else -(-config.tensor_parallel_size // machines.per_node),
        )

    # --- memory ---------------------------------------------------------------------------------------------------

    @cached_property
    def weight_bytes(self) -> float:
        """Of the whole engine, a draft model included. FP8 leaves embedding and output layer in 16 bits; each attention
        group has attention and embedding once."""
        return self._policy_bytes + self.draft_bytes + (self.attention_groups - 1) * self._attention_bytes

    @property
    def _attention_bytes(self) -> float:
        a = self.architecture
        matrices = a.all_attention_weights
        width = self.weight_bytes_per_parameter
        return matrices * width + a.vocab_size * a.hidden_size * max(width, 2.0)

    @property
    def _policy_bytes(self) -> float:
        a = self.architecture
        total = parameter_count(a)
        if self.weight_bytes_per_parameter >= 2:
            return total * self.weight_bytes_per_parameter
        kept = a.vocab_size * a.hidden_size * (1 if a.tie_word_embeddings else 2)
        return (total - kept) * self.weight_bytes_per_parameter + kept * 2.0

    @cached_property
    def kv_bytes_per_token(self) -> float:
        """Of the whole engine: 2 (key, value) x layers with attention x groups x head_dim. Where more devices share a
        token's cache than there are groups, copies are kept; of latents, and of indexers' keys, every device has all.
        """
        a, devices = self.architecture, self.tensor_parallel // self.attention_groups
        if a.latent is not None:
            return self._latent_bytes * devices + self._index_bytes * devices
        groups = max(a.num_query_groups, devices)
        return 2 * a.attention_layers * groups * a.head_dim * self.kv_bytes_per_element

    @property
    def _latent_bytes(self) -> float:
        """Of a token on each device, in all layers."""
        return self.architecture.num_layers * self.architecture.cached_size * self.kv_bytes_per_element

    @property
    def _index_bytes(self) -> float:
        """Of a token on each device: the keys of all indexers, in FP8 with a float32 scale for 128 features
        (DSATokenToKVPool in sglang/srt/mem_cache/memory_pool.py 0.5.23)."""
        indexer = self.architecture.indexer
        return 0.0 if indexer is None else self.architecture.indexer_layers * indexer.head_dim * (1 + 4 / 128)

    @cached_property
    def state_bytes(self) -> float:
        """Of a trajectory that is decoded, on the whole engine: states of layers without attention in float32, and
        the convolutions' last inputs."""
        a, sizes = self.architecture, self.architecture.recurrent
        if sizes is None:
            return 0.0
        cached = 4.0 * sizes.state_size
        return len(a.linear_layers) * (cached + (sizes.kernel - 1) * sizes.convolved_size * self.kv_bytes_per_element)

    @cached_property
    def cache_tokens(self) -> float:
        """Tokens whose keys and values fit; not positive where the weights alone do not fit."""
        static = self.memory_fraction * self.accelerator.memory_bytes * self.tensor_parallel
        tokens = (static - self.weight_bytes) / self.kv_bytes_per_token
        return tokens if self.max_cache_tokens is None else min(tokens, self.max_cache_tokens)

    def concurrency(self, context_tokens: float) -> int:
        """Trajectories decoded at one time when each holds ``context_tokens`` on average. At least 1."""
        tokens = context_tokens + self.state_bytes / self.kv_bytes_per_token
        return max(1, min(self.max_running, int(self.cache_tokens / tokens)))

    # --- memory beside weights and cache --------------------------------------------------------------------------

    @cached_property
    def prefill_graph_sizes(self) -> tuple[int, ...]:
        """Token counts of the prefills that SGLang captures: generate_prefill_cuda_graph_batch_sizes in
        sglang/srt/arg_groups/cuda_graph_hook.py 0.5.23, up to the tokens of a prefill."""
        largest = self._sglang_default(1) // self.attention_groups
        if self.architecture.latent is not None:
            largest = min(largest, 8192)
        if self.max_cache_tokens is not None:
            largest = min(largest, self.max_cache_tokens)
        stretches = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, 16385, 512))
        return tuple(size for stretch in stretches for size in range(*stretch) if size <= largest)

    @cached_property
    def largest_decode_graph(self) -> int:
        """Sequences of the largest decode step that SGLang captures."""
        return min(self.graph_batch, self._sglang_default(2 if self.tensor_parallel < 4 else 3))

    def _sglang_default(self, column: int) -> int:
        return int(next(row[column] for row in SGLANG_DEFAULTS if self.accelerator.memory_bytes < row[0]))

    @cached_property
    def graph_bytes(self) -> float:
        """Of CUDA graphs on each device; 0 on a CPU. They stay while the engine sleeps: the trainer releases weights
        and cache, and SGLang's prefill graphs refuse to be released (breakable_cuda_graph_backend.py, __init__).

            2 MiB x largest decode batch + 8 MiB x captured prefill sizes + tensors of the largest prefill

        The first two are what SGLang reserves for memory that torch does not count (reserve_for_graph_mb in
        sglang/srt/arg_groups/memory_hook.py 0.5.23; 1.5 GiB for the prefills with latent attention, 3 MiB more a
        sequence and group with attention groups, 4.5 MiB above 300 sequences).  Both kinds of graph share one pool of
        tensors (runner_utils/pool.py), so that the largest forward pass counts; see ``_largest_prefill_bytes``.
        """
        if self.accelerator.is_cpu:
            return 0.0
        decode, groups = self.largest_decode_graph, self.attention_groups
        reserved = 2.0 * decode
        if groups > 1:
            reserved += decode * groups * (4.5 if decode > 300 else 3)
        reserved += 8 * len(self.prefill_graph_sizes) if self.architecture.latent is None else 1536
        return reserved * MIB + self._largest_prefill_bytes

    @property
    def _largest_prefill_bytes(self) -> float:
        """Derived, not measured: of t tokens the graphs' output, residual and hidden states (3 h), and the widest point
        of a layer: attention's queries, keys, values and output, or an MLP's gate, up and product; of experts those of
        e t tokens and their outputs (fused_moe.py: intermediate caches 1 to 3), in 16 bits."""
        a, devices = self.architecture, self.tensor_parallel
        own = devices // self.attention_groups
        widths = [(2 * a.query_size + 2 * a.key_value_size) / own]
        if a.dense_mlps:
            widths.append(3 * a.ffn_hidden_size / devices)
        if a.is_moe:
            assert a.num_experts_per_tok is not None and a.moe_ffn_hidden_size is not None
            widths.append(a.num_experts_per_tok * (3 * a.moe_ffn_hidden_size + a.hidden_size))
        return max(self.prefill_graph_sizes) * 2.0 * (3 * a.hidden_size + max(widths))

    @property
    def routed_experts_host_bytes(self) -> float:
        """Pinned host memory of each device's process where the engine returns routed experts: int32 rows
        [tokens of its cache, layers, e] (BaseHostCache in sglang/srt/state_capturer/base.py 0.5.23)."""
        a = self.architecture
        rows = max(0.0, self.cache_tokens) / self.attention_groups
        return rows * a.num_layers * (a.num_experts_per_tok or 0) * 4

    # --- time -----------------------------------------------------------------------------------------------------

    @cached_property
    def _bandwidth(self) -> float:
        return self.tensor_parallel * self.accelerator.bandwidth * self.profile.bandwidth_efficiency

    @cached_property
    def _compute(self) -> float:
        fp8 = self.weight_bytes_per_parameter < 2 and self.accelerator.fp8_flops
        peak = self.accelerator.fp8_flops if fp8 else self.accelerator.flops
        return self.tensor_parallel * peak * self.profile.compute_efficiency

    @cached_property
    def seconds_per_context_token(self) -> float:
        """What each token of context adds to a decode step; of sparse attention, which reads so many latents of each
        sequence and no more (``_chosen_bytes``), only the indexers' keys."""
        read = self.kv_bytes_per_token
        if self.architecture.indexer is not None:
            read = self._index_bytes * (self.tensor_parallel // self.attention_groups)
        return read / self._bandwidth

    @property
    def _chosen_bytes(self) -> float:
        """Latents that sparse attention reads of a sequence in a decode step, on the whole engine. Shorter contexts
        have fewer, which is not counted."""
        indexer = self.architecture.indexer
        devices = self.tensor_parallel // self.attention_groups
        return 0.0 if indexer is None else self._latent_bytes * devices * indexer.index_topk

    @cached_property
    def _flops_per_token(self) -> float:
        a = self.architecture
        return a.num_layers * token_flops(a) + 2.0 * a.hidden_size * a.vocab_size

    @cached_property
    def _experts_flops(self) -> float:
        a = self.architecture
        assert a.num_experts is not None and a.num_experts_per_tok is not None
        return 2.0 * routed_expert_parameters(a) * a.num_experts_per_tok / a.num_experts

    def batch_seconds(self, batch: int) -> float:
        """A decode step of ``batch`` sequences, apart from reading their context."""
        seconds = self._batch_seconds.get(batch)
        if seconds is None:
            seconds = self._batch_seconds[batch] = self._compute_batch_seconds(batch)
        return seconds

    @cached_property
    def _batch_seconds(self) -> dict[int, float]:
        return {}

    def _compute_batch_seconds(self, batch: int) -> float:
        profile, a = self.profile, self.architecture
        seconds = profile.fixed_seconds + profile.per_sequence_seconds * batch
        read = self._read_bytes(batch) + batch * self._chosen_bytes
        seconds += read / self._bandwidth + batch * self._flops_per_token / self._compute
        if a.is_moe:
            slowdown = profile.compute_efficiency / profile.experts_compute_efficiency - 1
            seconds += batch * self._experts_flops / self._compute * slowdown
            seconds += len(a.expert_layers) * profile.experts_layer_seconds
        if self.tensor_parallel > 1:
            payload = 2.0 * batch * a.hidden_size * 2 * (self.tensor_parallel - 1) / self.tensor_parallel
            if self.nodes > 1:
                latency = profile.allreduce_latency + profile.network_latency
                allreduce = latency + payload / self.accelerator.inter_node_bandwidth
            else:
                allreduce = profile.allreduce_latency + payload / self.accelerator.intra_node_bandwidth
            seconds += a.sublayers * allreduce
        return seconds

    def _read_bytes(self, batch: int) -> float:
        """Weights that a step reads. The embedding table is looked up, not read."""
        a = self.architecture
        read = self.weight_bytes
        if not a.tie_word_embeddings:
            read -= a.vocab_size * a.hidden_size * max(2.0, self.weight_bytes_per_parameter)
        if a.is_moe:
            assert a.num_experts is not None and a.num_experts_per_tok is not None
            experts = routed_expert_parameters(a) * self.weight_bytes_per_parameter
            untouched = (1 - a.num_experts_per_tok / a.num_experts) ** batch
            read -= experts * untouched
        return read

    def step_seconds(self, batch: int, context_tokens: float) -> float:
        """One decode step of ``batch`` sequences whose contexts add up to ``context_tokens``."""
        return self.batch_seconds(batch) + self.seconds_per_context_token * context_tokens

    def prefill_seconds(self, new_tokens: float, cached_tokens: float = 0.0) -> float:
        """Reading ``new_tokens`` that follow ``cached_tokens`` whose keys and values are there."""
        a = self.architecture
        scored = pairs = new_tokens * (cached_tokens + new_tokens / 2)
        if a.indexer is not None:
            pairs = min(pairs, new_tokens * a.indexer.index_topk)
        of_pairs = pair_flops(a) * pairs + index_pair_flops(a) * scored
        flops = a.num_layers * (token_flops(a) * new_tokens + of_pairs)
        return flops / self._compute


def stored_bytes(directory: str | None) -> float:
    """Of the safetensors files in a model's directory; 0 where there is none on this host."""
    return (
        0.0 if directory is None else float(sum(file.stat().st_size for file in Path(directory).glob("*.safetensors")))
    )
