"""Tokens per second on a CPU, ours over transformers', on SmolLM2: one thread, same dtype, same greedy text.

Both run in this process, taking turns, so that they meet the same machine. Prints one JSON document.

    python benchmarks/cpu.py [--rounds 3] [--dtype float32] [--json results/cpu.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

from mrv2 import LLM, SamplingParams

SUBJECTS = ["the sea", "old maps", "a lighthouse", "bread", "clocks", "a train at night", "glass", "winter in the city"]
OPENINGS = ["Write about {}.", "Here is a long letter to a friend about {} and everything that came of it:"]
FILLER = " It was a quiet day, and there was time to look at each thing twice before saying anything about it."


def ragged_prompts(count: int) -> list[str]:
    """Prompts of about 5 to 250 tokens."""
    return [OPENINGS[i % 2].format(SUBJECTS[i % len(SUBJECTS)]) + FILLER * (i * 5 % 11) for i in range(count)]


class Theirs:
    """transformers' generate, batches padded on the left as it wants them."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(path, padding_side="left")

    def __call__(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        batch = self.tokenizer(prompts, return_tensors="pt", padding=True)
        with torch.inference_mode():
            out = self.model.generate(**batch, max_new_tokens=max_tokens, do_sample=False)
        eos = self.model.generation_config.eos_token_id
        return [cut(ids.tolist(), eos) for ids in out[:, batch["input_ids"].shape[1] :]]


class Ours:
    """`LLM.generate` without prefix cache hits from earlier rounds."""

    def __init__(self, dtype: str) -> None:
        self.llm = LLM("smollm2", dtype=dtype, device="cpu", max_model_len=1024, prefix_caching=False)

    def __call__(self, prompts: list[str], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        return [list(r.outputs[0].token_ids) for r in self.llm.generate(prompts, params)]


def cut(ids: list[int], eos: int | list[int] | None) -> list[int]:
    """Up to and with the end token; what follows is padding."""
    ends = [eos] if isinstance(eos, int) else (eos or [])
    at = [i for i, t in enumerate(ids) if t in ends]
    return ids[: at[0] + 1] if at else ids


def measure(
    run: Callable[[list[str], int], list[list[int]]], prompts: list[str], n: int
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    out = run(prompts, n)
    return sum(len(ids) for ids in out) / (time.perf_counter() - start), out


def compare(ours: Ours, theirs: Theirs, prompts: list[str], *, max_tokens: int, rounds: int) -> dict[str, Any]:
    """Warm both up, then let them take turns."""
    measure(ours, prompts[:1], 4)
    measure(theirs, prompts[:1], 4)
    rates: dict[str, list[float]] = {"ours": [], "theirs": []}
    equal = 0
    for _ in range(rounds):
        rate, mine = measure(ours, prompts, max_tokens)
        rates["ours"].append(rate)
        rate, other = measure(theirs, prompts, max_tokens)
        rates["theirs"].append(rate)
        equal = sum(a == b for a, b in zip(mine, other, strict=True))
    median = {who: statistics.median(r) for who, r in rates.items()}
    return {
        "requests": len(prompts),
        "max_tokens": max_tokens,
        "equal_texts": f"{equal}/{len(prompts)}",
        "tokens_per_second": {who: [round(r, 2) for r in values] for who, values in rates.items()},
        "median": {who: round(m, 2) for who, m in median.items()},
        "ratio": round(median["ours"] / median["theirs"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    ours = Ours(args.dtype)
    theirs = Theirs(ours.llm.model.config.path, getattr(torch, args.dtype))
    report = {
        "benchmark": "cpu",
        "command": f"python benchmarks/cpu.py --rounds {args.rounds} --dtype {args.dtype}",
        "model": "smollm2",
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "cpu": cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": [
            compare(ours, theirs, ["The history of computing began"], max_tokens=96, rounds=args.rounds),
            compare(ours, theirs, ragged_prompts(16), max_tokens=64, rounds=args.rounds),
        ],
    }
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


if __name__ == "__main__":
    main()
