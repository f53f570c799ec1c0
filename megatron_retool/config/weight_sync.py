"""How weights travel from the learner to the engines."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_retool.config.base import at_least_one, choice, positive


@dataclass(frozen=True)
class WeightSyncConfig:
    """The way of the weights, and what is compared afterwards."""

    method: str = choice("distributed", "tensor", "disk", "sharded")
    """distributed: NCCL or gloo broadcast from rank 0. tensor: shared memory or CUDA IPC, each engine from a learner
    rank of its node, colocated from the one on its first GPU. disk: files in the run. sharded: as distributed, but
    every rank broadcasts the parts that it holds, and no tensor is gathered."""
    bucket_bytes: int = at_least_one(512 * 2**20, maximum=2**40)
    """Size of the pieces in which weights travel."""
    verify: bool = False
    """Compare checksums of every tensor on both sides after each sync."""
    delta: bool = False
    """Send only the elements that have changed since the last sync, exact to the bit, and compare checksums each time.
    The sender keeps a copy of the weights on its host. Much smaller where engines hold fewer bits than an update moves:
    bfloat16 at a small learning rate. With method distributed or tensor."""
    delta_whole_every: int | None = at_least_one(None)
    """Syncs from one with whole weights to the next; null: only the first, and where engines were replaced."""
    round_to: str | None = choice(None, "fp8", "int8", "int4", "int3")
    """A study tool: engines get linear weights rounded to what such a quantisation holds, and compute in their own
    dtype, which shows its mismatch on any machine. fp8: blocks of 128 x 128, e4m3. intN: symmetric, to the nearest,
    a scale for each round_group_size inputs. Embeddings, norms, routers and the output layer stay as they are."""
    round_group_size: int = at_least_one(32)
    """Inputs of a row that share a scale, with intN."""
    fp8_scales: str = choice("auto", "float32", "power_of_two")
    """Of FP8 blocks, with round_to=fp8 or rollout.engine.quantization=fp8. auto: those that FP8 kernels of the GPU take
    that the weights come from, powers of two from Blackwell on, else float32. A name: always those, to imitate another
    GPU, or where engines have another than the learner."""
    check_log_probs: bool = True
    """At a run's first sync, and at the next one after an engine or the learner was restarted: compare log-probs of
    a fixed text, engine against learner, and stop where they are not of the same model. With learner.lora.sync=adapter
    once more a sync later: a fresh adapter adds nothing."""
    check_every: int | None = at_least_one(None)
    """Syncs from one such comparison of all engines to the next; null: only those that check_log_probs names."""
    max_log_prob_difference: float | None = positive(None)
    """Mean difference that check_log_probs admits, as a share of the log-probs' own spread (0: the same model, 1.4: any
    other); null: by precision, 0.005 in float32, 0.15 in bfloat16 or float16, 0.4 where FP8 takes part, none with
    round_to int4 or int3."""
    timeout_seconds: float = positive(300.0)
    """For one piece on its way."""
