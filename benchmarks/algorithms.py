"""Rollout correction, advantages and policy loss of one step: the flat ragged code against plain padded formulas.

    python benchmarks/algorithms.py [--sequences 512] [--max-length 16384] [--micro-batch-tokens 32768]

Both sides compute the same step (geometric mask, veto, token weights truncated at 2, the mismatch metrics that both
have, GRPO, clip-higher with token-mean, gradient with respect to the log-probs), each in a process of its own, and must
agree on the loss. Prints wall and CPU seconds, peak memory above the inputs, and the
ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any


def lengths_of(args: argparse.Namespace) -> Any:
    """Log-normal lengths with a tail that is cut at the limit, or all at the limit."""
    import torch

    if args.uniform:
        return torch.full((args.sequences,), args.max_length)
    generator = torch.Generator().manual_seed(args.seed)
    median = args.max_length / 4
    lengths = median * torch.exp(0.7 * torch.randn(args.sequences, generator=generator))
    return lengths.long().clamp(16, args.max_length)


def inputs_of(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    lengths = lengths_of(args)
    generator = torch.Generator().manual_seed(args.seed + 1)
    tokens = int(lengths.sum())
    rollout = -torch.rand(tokens, generator=generator)
    return {
        "lengths": lengths,
        "rollout": rollout,
        "train": rollout + 0.01 * torch.randn(tokens, generator=generator),
        "mask": torch.rand(tokens, generator=generator) < 0.8,
        "turns": torch.randint(0, 4, (tokens,), generator=generator).to(torch.int16),
        "rewards": torch.randint(0, 2, (args.sequences,), generator=generator).float() * 2 - 1,
        "groups": torch.arange(args.sequences) // 16,
    }


def flat_step(data: dict[str, Any], args: argparse.Namespace) -> float:
    import torch

    from megatron_retool.algorithms.advantages import AdvantageInputs, compute_advantages
    from megatron_retool.algorithms.loss_aggregation import token_weights
    from megatron_retool.algorithms.policy_loss import PolicyLossInputs, policy_loss
    from megatron_retool.algorithms.rollout_correction import rollout_correction
    from megatron_retool.algorithms.sequence_balance import pack_micro_batches
    from megatron_retool.config import AlgorithmConfig, RolloutCorrectionConfig

    config = AlgorithmConfig(
        rollout_correction=RolloutCorrectionConfig(mode="truncate", rejection=["geometric_ratio 0.999 1.001"])
    )
    count, lengths = len(data["lengths"]), data["lengths"]
    ids = torch.arange(count).repeat_interleave(lengths)
    correction = rollout_correction(
        data["train"], data["rollout"], data["mask"], ids, count, data["turns"], config.rollout_correction
    )
    batch = AdvantageInputs(data["rewards"], data["groups"], data["mask"], ids)
    advantages, _ = compute_advantages(config.estimator, batch)
    weights = token_weights(config.aggregation, data["mask"], ids, count, correction.keep_mask)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    total = 0.0
    for rows in pack_micro_batches(lengths.numpy(), max(args.micro_batch_tokens, int(lengths.max()))):
        take = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
        log_probs = (data["train"][take] + 0.01).requires_grad_()
        loss, _ = policy_loss(
            PolicyLossInputs(
                log_probs=log_probs,
                old_log_probs=data["train"][take],
                advantages=advantages[take],
                loss_mask=data["mask"][take],
                loss_weights=weights[take],
                sequence_ids=ids[take],
                importance_weights=correction.importance_weights[take],
            ),
            config.objective,
        )
        loss.backward()
        total += loss.item()
    return total


def padded_step(data: dict[str, Any], args: argparse.Namespace) -> float:
    import torch

    lengths = data["lengths"].tolist()

    def pad(column: Any) -> Any:
        return torch.nn.utils.rnn.pad_sequence(list(column.split(lengths)), batch_first=True)

    train, rollout, mask = pad(data["train"]), pad(data["rollout"]), pad(data["mask"])
    turns, m = pad(data["turns"]), pad(data["mask"]).float()
    n = m.sum(1).clamp(min=1)
    d = (train - rollout) * m
    ratio = d.clamp(-20, 20).exp()
    geometric = (d.sum(1) / n).exp()
    keep = (geometric >= 0.999) & (geometric <= 1.001) & ~((d < -9.2103404) & mask).any(1)
    weights = ratio.clamp(max=2.0)
    k3 = ratio - 1 - d
    p, q = train.exp(), rollout.exp()
    metrics = [((1 - ratio).abs() * m).sum(), (ratio.square() * m).sum(), (weights.square() * m).sum(), p[mask].std()]
    bins = ((q >= edge) & (q < edge + 0.2) for edge in (0, 0.2, 0.4, 0.6, 0.8))
    for part in (m * chosen for chosen in itertools.chain([mask, turns == 0, turns > 0], bins)):
        tokens = part.sum().clamp(min=1)
        pc, qc = (p - (p * part).sum() / tokens) * part, (q - (q * part).sum() / tokens) * part
        metrics += [(k3 * part).sum(), (d.abs() * part).sum(), (pc * qc).sum() / (pc.norm() * qc.norm())]
    rewards = data["rewards"].view(-1, 16)
    advantage = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    advantage = advantage[:, None].expand_as(m)
    log_probs = (train + 0.01).requires_grad_()
    policy_ratio = (log_probs - train).exp()
    objective = torch.min(policy_ratio * advantage, policy_ratio.clamp(0.8, 1.28) * advantage) * weights
    loss = -(objective * m * keep[:, None]).sum() / m.sum()
    loss.backward()
    return loss.item()


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    import torch

    torch.set_num_threads(args.threads)
    data = inputs_of(args)
    # The modules and the allocator's first pages belong to neither side.
    step = flat_step if name == "flat" else padded_step
    step(inputs_of(argparse.Namespace(**{**vars(args), "sequences": 16, "max_length": 64})), args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, started_cpu = time.perf_counter(), time.process_time()
    loss = step(data, args)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mib": (peak - before) / 1024, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=512, help="a multiple of 16 (the group size)")
    parser.add_argument("--max-length", type=int, default=16384)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--uniform", action="store_true", help="all responses at the limit: no padding to save")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.sequences % 16:
        parser.error("--sequences must be a multiple of 16")
    context = multiprocessing.get_context("spawn")
    results = {}
    for name in ("flat", "padded"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:  # each side in a process of its own
            results[name] = pool.submit(measure, name, args).result()
    flat, padded = results["flat"], results["padded"]
    tokens = int(lengths_of(args).sum())
    ratios = {key: flat[key] / max(padded[key], 1e-9) for key in ("seconds", "cpu_seconds", "peak_mib")}
    if abs(flat["loss"] - padded["loss"]) > 1e-3 * abs(padded["loss"]) + 1e-6:
        raise SystemExit(f"the two sides disagree: {flat['loss']} and {padded['loss']}")
    if args.json:
        print(json.dumps({"tokens": tokens, **results, "ratio": ratios}))
        return
    padding = 1 - tokens / (args.sequences * args.max_length)
    print(f"{args.sequences} responses, {tokens / 1e6:.2f} M tokens, {padding:.0%} of the padded layout is padding")
    for name, row in results.items():
        print(
            f"{name:7s} {row['seconds']:7.2f} s   CPU {row['cpu_seconds']:7.2f} s   peak {row['peak_mib']:7.0f} MiB   "
            f"loss {row['loss']:+.6f}"
        )
    print(f"ratio   {ratios['seconds']:7.2f}         {ratios['cpu_seconds']:7.2f}        {ratios['peak_mib']:7.2f}")


if __name__ == "__main__":
    main()
