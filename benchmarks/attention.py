"""Attention kernels on one GPU: decode against the card's copy bandwidth, prefill beside PyTorch's own attention.

Prints one JSON document; medians of many launches, the L2 cache emptied before each.

    python benchmarks/attention.py [--json benchmarks/results/attention-h200.json]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from mrv2.attn.backend import AttentionArgs
from mrv2.kernels.decode_attention import DecodeWorkspace, decode_attention
from mrv2.kernels.prefill_attention import prefill_attention

HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
"""As in Qwen3-0.6B."""
ARGS = AttentionArgs(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=None, scale=HEAD_DIM**-0.5, soft_cap=None
)


def median_us(fn: Callable[[], Any]) -> float:
    """Of a captured graph's replays: what the host takes to launch is another matter."""
    fn()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fn()
    return float(triton.testing.do_bench(graph.replay, warmup=50, rep=200, return_mode="median")) * 1e3


def copy_bandwidth() -> float:
    """Bytes per second of a device-to-device copy of 4 GiB, read and written bytes counted."""
    source = torch.randint(-(2**62), 2**62, (2**29,), device="cuda")
    target = torch.empty_like(source)
    # Not from a graph, whose copies are slower: it hands them to the copy engine.
    ms = triton.testing.do_bench(lambda: target.copy_(source), warmup=1000, rep=500, return_mode="median")
    return 2 * source.nbytes / (float(ms) * 1e-3)


def paged_inputs(seq_lens: list[int], query_lens: list[int], block_size: int) -> dict[str, Any]:
    """A step's tensors with random values, blocks scattered over the cache."""
    width = -(-max(seq_lens) // block_size)
    table = 1 + torch.randperm(len(seq_lens) * width, device="cuda").int().view(-1, width)
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    cache = torch.randn(table.numel() + 1, 2, block_size, KV_HEADS, HEAD_DIM, **bf16)
    q = torch.randn(sum(query_lens), HEADS, HEAD_DIM, **bf16)
    return {
        "q": q,
        "cache": cache,
        "block_table": table,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device="cuda"),
        "max_seq_len": max(seq_lens),
        "scale": ARGS.scale,
        "window": None,
        "soft_cap": None,
        "out": torch.empty_like(q),
    }


def bench_decode(seq_lens: list[int], block_size: int, copy: float, workspace: DecodeWorkspace) -> dict[str, Any]:
    """Bytes counted: each key and value once, queries and results."""
    inputs = paged_inputs(seq_lens, [1] * len(seq_lens), block_size)
    us = median_us(lambda: decode_attention(**inputs, num_decodes=len(seq_lens), workspace=workspace))
    num_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * sum(seq_lens) + 2 * inputs["q"].nbytes
    return {
        "requests": len(seq_lens),
        "tokens": sum(seq_lens),
        "longest": max(seq_lens),
        "block_size": block_size,
        "us": round(us, 1),
        "bytes_per_s": round(num_bytes / us * 1e6),
        "of_copy_bandwidth": round(num_bytes / us * 1e6 / copy, 3),
    }


def bench_prefill(num_reqs: int, query_len: int, seq_len: int, block_size: int) -> dict[str, Any]:
    """Operations counted: two products per query head and visible pair."""
    inputs = paged_inputs([seq_len] * num_reqs, [query_len] * num_reqs, block_size)
    starts = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * query_len
    ours = median_us(
        lambda: prefill_attention(**inputs, query_start_loc=starts, num_decodes=0, max_query_len=query_len)
    )
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(num_reqs, HEADS, query_len, HEAD_DIM, **bf16)
    k, v = (torch.randn(num_reqs, KV_HEADS, seq_len, HEAD_DIM, **bf16) for _ in range(2))
    mask = None if query_len == seq_len else causal_lower_right(query_len, seq_len)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        theirs = median_us(
            lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=ARGS.scale
            )
        )
    pairs = num_reqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
    operations = 4 * HEADS * HEAD_DIM * pairs
    return {
        "requests": num_reqs,
        "query_len": query_len,
        "seq_len": seq_len,
        "block_size": block_size,
        "us": round(ours, 1),
        "tflops": round(operations / ours * 1e-6, 1),
        "sdpa_us": round(theirs, 1),
        "sdpa_tflops": round(operations / theirs * 1e-6, 1),
        "time_over_sdpa": round(ours / theirs, 2),
    }


def ragged(num_reqs: int, longest: int) -> list[int]:
    """Lengths from 1 to `longest`, evenly spread, in random order."""
    g = torch.Generator().manual_seed(0)
    return (torch.randperm(num_reqs, generator=g) * (longest - 1) // max(1, num_reqs - 1) + 1).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the document there too")
    args = parser.parse_args()
    torch.manual_seed(0)
    copy, workspace = copy_bandwidth(), DecodeWorkspace()
    batches = [
        [1024] * 256,
        ragged(256, 2048),
        [1024] * 64,
        [1024] * 32,
        [1024],
        [32768],
        [8192] * 8,
        [32768] + [500] * 63,
    ]
    result = {
        "benchmark": "attention",
        "command": " ".join(["python", *sys.argv]),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "shape": f"{HEADS} query heads, {KV_HEADS} key heads, head_dim {HEAD_DIM}, bfloat16",
        "copy_bytes_per_s": round(copy),
        "decode": [bench_decode(lens, size, copy, workspace) for lens in batches for size in (16, 64)],
        "prefill": [
            bench_prefill(*shape, size)
            for shape in ((1, 4096, 4096), (8, 1024, 1024), (1, 512, 8192))
            for size in (16, 64)
        ],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
