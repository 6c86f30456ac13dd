"""Kernels on one GPU, each beside what it is measured against. Prints one JSON document.

decode-attention against the card's copy bandwidth, prefill-attention beside PyTorch's own, input-preparation of a
decode step, sampling over a vocabulary of 152k, moe beside a loop over the experts.

    python benchmarks/kernels.py [--section NAME ...] [--json benchmarks/results/kernels-h200.json]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timing import copy_bandwidth, eager_us, environment, graph_us, host_us, kernels_us
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from mrv2.api import RequestData
from mrv2.attn.backend import AttentionArgs
from mrv2.attn.groups import KVGroup
from mrv2.kernels.decode_attention import decode_attention
from mrv2.kernels.decode_splits import DecodeWorkspace
from mrv2.kernels.prefill_attention import prefill_attention
from mrv2.sample.params import MAX_STOP_TOKEN_IDS, SamplingParams
from mrv2.sample.sampler import Sampler
from mrv2.sample.states import SamplingStates
from mrv2.state.block_tables import BlockTables
from mrv2.state.input_buffers import InputBuffers
from mrv2.state.plan import BlockWrites, StepPlan
from mrv2.state.request_states import RequestStates
from mrv2.state.view import Limits

HEADS, KV_HEADS, HEAD_DIM, VOCAB = 16, 8, 128, 151936
"""As in Qwen3-0.6B."""
ARGS = AttentionArgs(
    num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, window=None, scale=HEAD_DIM**-0.5, soft_cap=None
)

Results = list[dict[str, Any]]


# -- attention -------------------------------------------------------------------------------------------


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


def ragged(num_reqs: int, longest: int) -> list[int]:
    """Lengths from 1 to `longest`, evenly spread, in random order."""
    g = torch.Generator().manual_seed(0)
    return (torch.randperm(num_reqs, generator=g) * (longest - 1) // max(1, num_reqs - 1) + 1).tolist()


DECODES = (
    [1024] * 256,
    ragged(256, 2048),
    [1024] * 64,
    [1024] * 32,
    [1024],
    [32768],
    [8192] * 8,
    [32768] + [500] * 63,
)


def measure_decode_attention(device: torch.device, copy: float) -> Results:
    """Bytes counted: each key and value once, queries and results."""
    workspace, results = DecodeWorkspace(), []
    for seq_lens in DECODES:
        for block_size in (16, 64):
            inputs = paged_inputs(seq_lens, [1] * len(seq_lens), block_size)
            inputs |= {"num_decodes": len(seq_lens), "workspace": workspace}
            us = graph_us(lambda inputs=inputs: decode_attention(**inputs))
            num_bytes = 2 * 2 * KV_HEADS * HEAD_DIM * sum(seq_lens) + 2 * inputs["q"].nbytes
            results.append(
                {
                    "requests": len(seq_lens),
                    "tokens": sum(seq_lens),
                    "longest": max(seq_lens),
                    "block_size": block_size,
                    "us": round(us, 1),
                    "bytes_per_s": round(num_bytes / us * 1e6),
                    "of_copy_bandwidth": round(num_bytes / us * 1e6 / copy, 3),
                }
            )
    return results


def measure_prefill_attention(device: torch.device, copy: float) -> Results:
    """Operations counted: two products per query head and visible pair."""
    results = []
    for num_reqs, query_len, seq_len in ((1, 4096, 4096), (8, 1024, 1024), (1, 512, 8192)):
        theirs = sdpa_us(num_reqs, query_len, seq_len)
        for block_size in (16, 64):
            inputs = paged_inputs([seq_len] * num_reqs, [query_len] * num_reqs, block_size)
            inputs["query_start_loc"] = torch.arange(num_reqs + 1, dtype=torch.int32, device="cuda") * query_len
            inputs |= {"num_decodes": 0, "max_query_len": query_len}
            ours = graph_us(lambda inputs=inputs: prefill_attention(**inputs))
            pairs = num_reqs * (query_len * (seq_len - query_len) + query_len * (query_len + 1) // 2)
            operations = 4 * HEADS * HEAD_DIM * pairs
            results.append(
                {
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
            )
    return results


def sdpa_us(num_reqs: int, query_len: int, seq_len: int) -> float:
    """The same with PyTorch's kernel on contiguous keys."""
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}
    q = torch.randn(num_reqs, HEADS, query_len, HEAD_DIM, **bf16)
    k, v = (torch.randn(num_reqs, KV_HEADS, seq_len, HEAD_DIM, **bf16) for _ in range(2))
    mask = None if query_len == seq_len else causal_lower_right(query_len, seq_len)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return graph_us(
            lambda: F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True, scale=ARGS.scale
            )
        )


# -- input preparation -----------------------------------------------------------------------------------


def request(i: int, num_tokens: int, sampling: SamplingParams) -> RequestData:
    tokens_np = np.full(num_tokens, 1, np.int32)
    return RequestData(
        req_id=str(i),
        prompt_token_ids=tokens_np,
        prefill_token_ids=tokens_np,
        num_computed_tokens=num_tokens - 1,
        sampling=sampling,
        seed=i,
        len_limit=num_tokens + 100,
        stop_token_ids=(),
    )


def measure_input_preparation(device: torch.device, copy: float) -> Results:
    """A decode step of requests with 1024 tokens each; with several KV groups as hybrid models have them."""
    results = []
    for num_reqs, num_groups in ((1, 1), (32, 1), (256, 1), (256, 4)):
        limits = Limits(max_rows=num_reqs, max_num_tokens=max(2048, num_reqs), max_model_len=2048, device=device)
        groups = tuple(
            KVGroup(name=f"g{k}", index=k, layers=(f"l{k}",), window=None, block_size=16) for k in range(num_groups)
        )
        states = RequestStates(limits, max_stop_ids=MAX_STOP_TOKEN_IDS)
        tables, buffers = BlockTables(limits, groups), InputBuffers(limits, groups)
        rows_np, num_blocks = np.arange(num_reqs, dtype=np.int32), 1024 // 16
        for row in range(num_reqs):
            states.add_request(row, request(row, 1024, SamplingParams()))
        writes = BlockWrites(
            rows=rows_np,
            starts=np.zeros(num_reqs, np.int32),
            cu_lens=np.arange(num_reqs + 1, dtype=np.int32) * num_blocks,
            block_ids=1 + np.arange(num_reqs * num_blocks, dtype=np.int32),
        )
        tables.stage((writes,) * num_groups)
        states.flush()
        tables.flush()
        plan = StepPlan(
            step_id=0,
            removed=(),
            added=(),
            rows_np=rows_np,
            query_lens_np=np.ones(num_reqs, np.int32),
            block_writes=(),
            num_decodes=num_reqs,
            num_tokens=num_reqs,
            max_query_len=1,
            max_seq_len=1024,
        )
        results.append(
            {"requests": num_reqs, "kv_groups": num_groups} | time_preparation(plan, buffers, states, tables)
        )
    return results


@torch.inference_mode()
def time_preparation(
    plan: StepPlan, buffers: InputBuffers, states: RequestStates, tables: BlockTables
) -> dict[str, Any]:
    """By events around eager calls, as a graph's replay, by the profiler, and the host's share."""

    def prepare() -> None:
        buffers.prepare(plan, states, tables)

    def gather() -> None:
        n = plan.num_reqs
        buffers.gather(buffers.batch, states, tables, num_reqs=n, num_tokens=n, max_seq_len=plan.max_seq_len)

    return {
        "events_us": round(eager_us(prepare), 2),
        "graph_us": round(graph_us(gather), 2),
        "kernels_us": kernels_us(prepare),
        "host_us": round(host_us(prepare), 1),
    }


# -- sampling --------------------------------------------------------------------------------------------

SAMPLINGS = {
    "greedy": SamplingParams(temperature=0),
    "random": SamplingParams(temperature=1),
    "top-k 50": SamplingParams(temperature=1, top_k=50),
    "top-k 50, top-p 0.9": SamplingParams(temperature=1, top_k=50, top_p=0.9),
    "top-p 0.9": SamplingParams(temperature=1, top_p=0.9),
    "min-p 0.05": SamplingParams(temperature=1, min_p=0.05),
}


def measure_sampling(device: torch.device, copy: float) -> Results:
    """From logits to tokens. The floor is one read of the logits at copy bandwidth."""
    results = []
    for num_reqs in (1, 32, 256):
        limits = Limits(max_rows=num_reqs, max_num_tokens=num_reqs, max_model_len=2048, device=device, vocab_size=VOCAB)
        logits = torch.randn(num_reqs, VOCAB, device=device) * 3
        rows_np = np.arange(num_reqs, dtype=np.int32)
        rows, positions = torch.from_numpy(rows_np).to(device), torch.full((num_reqs,), 1024, device=device)
        argmax = graph_us(lambda logits=logits: logits.argmax(-1))
        for name, params in SAMPLINGS.items():
            states = SamplingStates(limits)
            for row in range(num_reqs):
                states.add_request(row, request(row, 8, params))
            states.flush()
            sampler, needs = Sampler(states), states.needs(rows_np)
            us = graph_us(lambda s=sampler, x=logits, r=rows, p=positions, n=needs: s(x, r, p, n))
            results.append(
                {
                    "requests": num_reqs,
                    "sampling": name,
                    "us": round(us, 1),
                    "floor_us": round(logits.nbytes / copy * 1e6, 1),
                    "torch_argmax_us": round(argmax, 1),
                }
            )
    return results


# -- all -------------------------------------------------------------------------------------------------


def measure_moe(device: torch.device, copy: float) -> Results:
    from kernel_moe import measure_moe as measure

    results: Results = measure(device)
    return results


SECTIONS: dict[str, Callable[[torch.device, float], Results]] = {
    "decode-attention": measure_decode_attention,
    "prefill-attention": measure_prefill_attention,
    "input-preparation": measure_input_preparation,
    "sampling": measure_sampling,
    "moe": measure_moe,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="default: all")
    parser.add_argument("--json", type=Path, help="write the document there too")
    args = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    copy = copy_bandwidth()
    report: dict[str, Any] = {
        "benchmark": "kernels",
        **environment(device),
        "shape": f"{HEADS} query heads, {KV_HEADS} key heads, head_dim {HEAD_DIM}, bfloat16; vocabulary {VOCAB}",
        "copy_bytes_per_s": round(copy),
    }
    for name in args.section:
        report[name] = SECTIONS[name](device, copy)
        torch.cuda.empty_cache()
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
