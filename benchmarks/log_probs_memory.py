"""Peak memory of log-probs and entropy, forward and backward: chunked head against the plain way.

    python benchmarks/log_probs_memory.py [--vocabulary 151936] [--tokens 8192] [--chunk-tokens 1024]

Each way runs in a process of its own; its peak resident memory above that of its inputs counts. The plain way's memory
is proportional to the tokens: --plain-tokens of them are measured and scaled up, where all do not fit this machine.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def measure(way: str, vocabulary: int, tokens: int, hidden_size: int, chunk_tokens: int) -> tuple[float, float]:
    """(bytes above the inputs and the weight's gradient, seconds) of one forward and backward pass in this process."""
    import torch

    torch.set_num_threads(1)
    from megatron_retool.learner.log_probs import log_probs_and_entropy

    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, requires_grad=True)
    # Both ways need the weight's gradient; it stands outside the comparison.
    weight.grad = torch.zeros_like(weight)
    targets = torch.randint(0, vocabulary, (tokens,))
    torch.mm(hidden[:8], weight[:8].T).sum().item()  # load the math library
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if way == "chunked":
        log_probs, entropy = log_probs_and_entropy(
            hidden, weight, targets, vocab_size=vocabulary, chunk_tokens=chunk_tokens, main_grad=weight.grad
        )
    else:
        log_p = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
        log_probs = log_p.gather(-1, targets[:, None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
    (log_probs.sum() + 0.01 * entropy.sum()).backward()
    seconds = time.perf_counter() - start
    return 1024.0 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--plain-tokens", type=int, default=1024)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--chunk-tokens", type=int, default=1024)
    parser.add_argument("--way", choices=("chunked", "plain"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = (options.vocabulary, options.tokens, options.hidden_size, options.chunk_tokens)
    if options.way:
        print(*measure(options.way, *sizes))
        return
    peaks = {}
    for way, tokens in (("chunked", options.tokens), ("plain", min(options.plain_tokens, options.tokens))):
        command = [sys.executable, __file__, f"--way={way}", f"--tokens={tokens}"]
        command += [f"--vocabulary={options.vocabulary}", f"--hidden-size={options.hidden_size}"]
        command += [f"--chunk-tokens={options.chunk_tokens}"]
        output = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        peak, seconds = (float(word) for word in output.split())
        scale = options.tokens / tokens
        peaks[way] = peak * scale
        measured = "" if tokens == options.tokens else f" ({tokens} tokens measured, scaled)"
        print(f"{way:8s} {peak * scale / 2**20:9.0f} MiB {seconds * scale:7.1f} s{measured}")
    print(f"vocabulary {options.vocabulary}, {options.tokens} tokens: ratio {peaks['chunked'] / peaks['plain']:.4f}")


if __name__ == "__main__":
    main()
