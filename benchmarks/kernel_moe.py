"""A mixture of experts on one GPU, from the router's product to the sum, beside cuBLAS and the card's bandwidth.

Prints one JSON document. Of each shape and number of tokens:

- `us`: ours, as a graph's replay, the L2 cache emptied before each;
- `floor_us`: one read of the experts that any token goes to, of the router, of the tokens, and one write of the
  result, at the speed of a plain copy;
- `loop_us`: two cuBLAS products for each of these experts, as a graph's replay, with the tokens of each expert known
  beforehand: what no step can do, and the best such a loop can be;
- `eager_loop_us`: the usual loop, which asks the device for the tokens of each expert, by the host's clock.

    python benchmarks/kernel_moe.py [--tokens 1 32 ...] [--json benchmarks/results/kernel_moe-h200.json]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from timing import copy_bandwidth, environment, graph_us, kernels_us
from torch import Tensor, nn

from mrv2.kernels.expert_tile import choose_block_rows
from mrv2.layers.moe import Experts, Router

SHAPES = {
    "Qwen3-30B-A3B": {"hidden": 2048, "intermediate": 768, "num_experts": 128, "top_k": 8},
    "Mixtral-8x7B": {"hidden": 4096, "intermediate": 14336, "num_experts": 8, "top_k": 2},
}
TOKENS = (1, 32, 256, 2048)
Assignment = tuple[int, Tensor, Tensor]
"""An expert, its tokens, and where among each token's experts it stands."""


class MoE(nn.Module):
    """Router and experts as the layer has them, with random weights, and the loop over the same weights."""

    def __init__(self, hidden: int, intermediate: int, num_experts: int, top_k: int, device: torch.device) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with device:
                self.gate = Router(hidden, num_experts=num_experts, top_k=top_k, renormalize=True)
                self.experts = Experts(hidden, intermediate, num_experts=num_experts, top_k=top_k, act="silu")
        finally:
            torch.set_default_dtype(before)
        for parameter in self.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)

    def forward(self, x: Tensor, ctx: Any) -> Tensor:
        out: Tensor = self.experts(x, *self.gate(x, ctx))
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """In PyTorch's operations."""
        weights, experts = F.linear(x, self.gate.weight).float().softmax(-1).topk(self.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts

    def assignments(self, experts: Tensor) -> list[Assignment]:
        """Those of each expert that any token goes to; waits for the device."""
        found = []
        for expert in range(self.num_experts):
            tokens, k = (experts == expert).nonzero(as_tuple=True)
            if len(tokens):
                found.append((expert, tokens, k))
        return found

    def loop(self, x: Tensor, assignments: list[Assignment] | None) -> Tensor:
        """One expert after the other, by cuBLAS."""
        weights, experts = self.route(x)
        out = torch.zeros_like(x)
        for expert, tokens, k in self.assignments(experts) if assignments is None else assignments:
            gate, up = F.linear(x[tokens], self.experts.w13[expert]).chunk(2, -1)
            part = F.linear(F.silu(gate) * up, self.experts.w2[expert])
            out.index_add_(0, tokens, part * weights[tokens, k, None])
        return out


@torch.inference_mode()
def measure_moe(
    device: torch.device, *, tokens: tuple[int, ...] = TOKENS, copy: float | None = None
) -> list[dict[str, Any]]:
    """One entry for each shape and number of tokens, bfloat16.

    Args:
        device: a CUDA device.
        tokens: numbers of tokens.
        copy: bytes per second of a copy, read and written bytes counted; None: measured here.
    """
    copy = copy_bandwidth() if copy is None else copy
    results = []
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        moe = MoE(**shape, device=device)
        results += [{"shape": name, **measure(moe, n, copy)} for n in tokens]
        del moe
        torch.cuda.empty_cache()
    return results


def measure(moe: MoE, num_tokens: int, copy: float) -> dict[str, Any]:
    """All figures of one number of tokens, and how far ours and the loop are apart."""
    experts = moe.experts
    num_experts, hidden, intermediate = experts.w2.shape
    x = torch.randn(num_tokens, hidden, dtype=torch.bfloat16, device=experts.w2.device)
    ctx = SimpleNamespace(num_real=torch.tensor([num_tokens], dtype=torch.int32, device=x.device))
    assignments = moe.assignments(moe.gate(x, ctx)[1])
    expected = moe.loop(x, assignments).float()
    difference = float((moe(x, ctx).float() - expected).norm() / expected.norm())
    assert difference < 2e-2, difference
    per_expert = 3 * hidden * intermediate
    num_bytes = 2 * (len(assignments) * per_expert + num_experts * hidden) + 2 * x.nbytes
    us, loop = graph_us(lambda: moe(x, ctx)), graph_us(lambda: moe.loop(x, assignments))
    floor = num_bytes / copy * 1e6
    return {
        "tokens": num_tokens,
        "experts_used": len(assignments),
        "block_rows": choose_block_rows(num_tokens, moe.top_k, num_experts, x.dtype),
        "us": round(us, 1),
        "floor_us": round(floor, 1),
        "of_copy_bandwidth": round(floor / us, 3),
        "tflops": round(2 * num_tokens * moe.top_k * per_expert / us * 1e-6, 1),
        "loop_us": round(loop, 1),
        "loop_over_ours": round(loop / us, 2),
        "eager_loop_us": round(wall_us(moe, x), 1),
        "difference": round(difference, 5),
        "kernels_us": kernels_us(lambda: moe(x, ctx)),
    }


def wall_us(moe: MoE, x: Tensor, repeats: int = 10) -> float:
    """Microseconds of the usual loop; it waits for the device again and again, so the host's clock it is."""
    for _ in range(3):
        moe.loop(x, None)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        moe.loop(x, None)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, metavar="N")
    parser.add_argument("--json", type=Path, help="write the document there too")
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    copy = copy_bandwidth()
    report = {
        "benchmark": "kernel_moe",
        **environment(device),
        "shapes": SHAPES,
        "copy_bytes_per_s": round(copy),
        "moe": measure_moe(device, tokens=tuple(args.tokens), copy=copy),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
