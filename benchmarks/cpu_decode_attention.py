"""Attention of one decoding step of a CPU engine: the cache read where it lies, against torch's attention on a copy.

    python benchmarks/decode_attention.py [--requests 128] [--length 120]

One layer of the demo's shape (4 heads, 2 KV heads, 32 features, float32), one thread. The baseline copies keys and
values of each request side by side and calls scaled_dot_product_attention on them, as engines do that are seeded or
compute in 16 bits. The two alternate; the medians count.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import embedding, scaled_dot_product_attention

from sglang_cpu_engine import decode_attention

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 32, 65536


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--length", type=int, default=120, help="tokens of the longest request; the shortest has half")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    keys, values = torch.randn(SLOTS, KV_HEADS, SIZE), torch.randn(SLOTS, KV_HEADS, SIZE)
    lengths = torch.randint(options.length // 2, options.length + 1, (options.requests,))
    lengths[0] = options.length
    rows = torch.randperm(options.requests)
    table = torch.randint(1, SLOTS - options.length, (options.requests, 1)) + torch.arange(options.length)
    query = torch.randn(options.requests, HEADS, SIZE)

    def in_place() -> torch.Tensor:
        return decode_attention.attend(query, keys, values, table.int(), rows, lengths, None)

    def copied() -> torch.Tensor:
        visible = torch.arange(options.length) < lengths[:, None]
        slots = torch.where(visible, table[rows], 0)
        sides = (embedding(slots, x.view(SLOTS, -1)).view(*slots.shape, KV_HEADS, SIZE) for x in (keys, values))
        grouped = query.view(options.requests, KV_HEADS, HEADS // KV_HEADS, SIZE)
        out = scaled_dot_product_attention(
            grouped, *(x.transpose(1, 2) for x in sides), attn_mask=visible[:, None, None]
        )
        return out.reshape(query.shape)

    torch.testing.assert_close(in_place(), copied())
    seconds: dict[str, list[float]] = {"in place": [], "copied": []}
    for _ in range(200):
        for name, run in (("in place", in_place), ("copied", copied)):
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    result = {name: 1e3 * statistics.median(each) for name, each in seconds.items()}
    ratio = result["in place"] / result["copied"]
    print(f"in place {result['in place']:.2f} ms, copied {result['copied']:.2f} ms: {ratio:.2f}")


if __name__ == "__main__":
    main()
