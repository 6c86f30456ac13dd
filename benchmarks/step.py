"""Whole-step CUDA graphs on a GPU: device and host time of a decode step, offline throughput, and time to ready.

The model has Qwen3-0.6B's shape and random bf16 weights, so that nothing has to be downloaded. Workloads are those of
`bench_vllm.py`, which measures the other side. Prints one JSON document.

    python benchmarks/step.py [--parts decode,profile,throughput,mixed,ready] [--batches 1 32 128 256]
        [--repeat 3] [--no-graphs] [--json benchmarks/results/step-h200.json] [--tiny]

- decode: microseconds of device per replay between events, host per step without waiting, and idle between replays, at
  about 288 tokens of context.
- profile: the kernels of a step.
- throughput: batches that start together; mixed: 256 requests of 100 to 1024 tokens in and out.
- ready: from `LLM()` to the first possible step, in processes of their own, with an empty and a warm Triton cache.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_model import SHAPE, TINY, make_model, write_config
from timing import environment

import mrv2.frontend.llm
from mrv2 import LLM, SamplingParams
from mrv2.bench.steps import WARM, measure_steps, profile_steps, start_decoding
from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig

PROMPT, MEASURED = 256, 32  # 272 to 304 tokens of context
DECODE = [(1, 32, 512, 0.0), (32, 32, 512, 0.0), (128, 32, 512, 0.0), (256, 32, 512, 0.0), (256, 32, 512, 1.0)]
DECODE += [(256, 512, 256, 1.0)]
SETTINGS = {"max_model_len": 4096, "max_num_seqs": 512, "max_num_tokens": 8192, "prefix_caching": False, "seed": 0}


# -- steps -------------------------------------------------------------------------------------------------


def decoding(model: LoadedModel, batch: int, device: torch.device, graphs: bool) -> EngineParts:
    """An engine with `batch` requests that are all past their prompts."""
    config = EngineConfig(
        device=str(device),
        max_num_seqs=batch,
        max_num_tokens=max(2048, batch * PROMPT),  # all prompts in one step, or contexts would differ
        max_model_len=2048,
        graphs=graphs,
    )
    parts = assemble(model, config)
    start_decoding(parts, batch, prompt_len=PROMPT, steps=MEASURED, rng=random.Random(0))
    return parts


def measure_decode(model: LoadedModel, batch: int, device: torch.device, graphs: bool) -> dict[str, Any]:
    parts = decoding(model, batch, device, graphs)
    result: dict[str, Any] = {"batch": batch, "context": PROMPT + WARM + MEASURED // 2}
    result |= measure_steps(parts, MEASURED)
    if parts.graphs is not None:
        stats = parts.graphs
        result["graphs"] = {
            "captures": stats.captures,
            "capture_seconds": round(stats.capture_seconds, 3),
            "eager": stats.eager,
        }
    return result


def measure_profile(model: LoadedModel, batch: int, device: torch.device, graphs: bool) -> dict[str, Any]:
    return {"batch": batch} | profile_steps(decoding(model, batch, device, graphs))


# -- requests ----------------------------------------------------------------------------------------------


def make_llm(args: argparse.Namespace) -> LLM:
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(TINY if args.tiny else SHAPE, Path(folder))
        graphs = None if args.graphs else False
        return LLM(model, weights="random", dtype="bfloat16", device=args.device, graphs=graphs, **SETTINGS)


def timed(llm: LLM, prompt_lens: list[int], new: list[int], temperature: float, rng: random.Random) -> float:
    low, high = (1000, 150000) if llm.limits.vocab_size > 150000 else (1, llm.limits.vocab_size)
    prompts = [[rng.randrange(low, high) for _ in range(n)] for n in prompt_lens]
    params = [SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True) for n in new]
    start = time.perf_counter()
    results = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    assert [len(r.outputs[0].token_ids) for r in results] == new
    return seconds


def measure_throughput(llm: LLM, cases: list[tuple[int, int, int, float]], repeat: int) -> list[dict[str, Any]]:
    rng, rows = random.Random(0), []
    for temperature in (0.0, 1.0):
        timed(llm, [16] * 8, [16] * 8, temperature, rng)
    for batch, prompt_len, new, temperature in cases:
        times = [timed(llm, [prompt_len] * batch, [new] * batch, temperature, rng) for _ in range(repeat)]
        mid = statistics.median(times)
        rows.append(
            {
                "batch": batch,
                "prompt_tokens": prompt_len,
                "new_tokens": new,
                "temperature": temperature,
                "seconds": [round(t, 3) for t in times],
                "tokens_per_second": round(batch * new / mid),
                "ms_per_step": round(mid / new * 1e3, 3),
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure_mixed(llm: LLM, repeat: int) -> dict[str, Any]:
    shape, rng = random.Random(0), random.Random(1)
    prompt_lens, new = ([shape.randint(100, 1024) for _ in range(256)] for _ in range(2))
    times = [timed(llm, prompt_lens, new, 0.6, rng) for _ in range(repeat)]
    return {
        "seconds": [round(t, 3) for t in times],
        "tokens_per_second": round(sum(new) / statistics.median(times)),
    }


def graph_report(llm: LLM) -> dict[str, Any] | None:
    stats = llm.graph_stats
    if stats is None:
        return None
    return {
        "captures": stats.captures,
        "capture_seconds": round(stats.capture_seconds, 3),
        "replays": stats.replays,
        "prompts": stats.prompts,
        "prompts_eager": stats.prompts_eager,
        "steps": llm.stats.steps,
        "eager": stats.eager,
    }


# -- start -------------------------------------------------------------------------------------------------


def ready_once(args: argparse.Namespace, imported: float) -> dict[str, Any]:
    """In a process of its own."""
    marks: dict[str, float] = {}
    start = time.perf_counter()
    make = mrv2.frontend.llm.load

    def loaded(*a: Any) -> LoadedModel:
        model = make(*a)
        marks["weights_s"] = time.perf_counter() - start
        return model

    mrv2.frontend.llm.load = loaded  # type: ignore[assignment]
    llm = make_llm(args)
    mrv2.frontend.llm.load = make
    if args.device == "cuda":
        torch.cuda.synchronize()
    marks["ready_s"] = time.perf_counter() - start
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1))
    marks["first_token_s"] = time.perf_counter() - start
    llm.generate([[1, 2, 3]] * 4, SamplingParams(temperature=1, max_tokens=8, ignore_eos=True))
    marks["eight_tokens_s"] = time.perf_counter() - start
    marks["imports_s"] = imported
    return {name: round(value, 2) for name, value in sorted(marks.items())} | {"graphs": graph_report(llm)}


def measure_ready(args: argparse.Namespace) -> dict[str, Any]:
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("empty_cache", "warm_cache"):
            command = [sys.executable, __file__, "--ready-once", "--device", args.device]
            command += ["--tiny"] * args.tiny + ["--no-graphs"] * (not args.graphs)
            started = time.perf_counter()
            environ = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                results[name] = {"error": done.stderr[-2000:]}
                continue
            results[name] = json.loads(done.stdout.splitlines()[-1])
            results[name]["process_s"] = round(time.perf_counter() - started, 2)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="decode,profile,throughput,mixed,ready")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--ready-once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.ready_once:
        print(json.dumps(ready_once(args, IMPORTED)))
        return
    device = torch.device(args.device)
    parts = args.parts.split(",")
    report: dict[str, Any] = {"benchmark": "step", **environment(device), "graphs": args.graphs}
    report["shape"] = TINY if args.tiny else SHAPE

    def note(name: str, result: Any) -> None:
        report.setdefault(name, []).append(result)
        print(name, json.dumps(result), file=sys.stderr, flush=True)
        if args.json:  # after each result: a run that is cut short has left what it knows
            args.json.write_text(json.dumps(report, indent=2) + "\n")

    if "decode" in parts or "profile" in parts:
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(report["shape"], device, Path(folder))
        for batch in args.batches if "decode" in parts else ():
            note("decode", measure_decode(model, batch, device, args.graphs and device.type == "cuda"))
            gc.collect()
        # Last: where a profiler has been at work, launching a graph takes the host ten times as long from then on.
        for batch in args.batches if "profile" in parts and device.type == "cuda" else ():
            note("profile", measure_profile(model, batch, device, args.graphs))
            gc.collect()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    if "throughput" in parts or "mixed" in parts:
        with make_llm(args) as llm:
            if "throughput" in parts:
                cases = [c for c in DECODE if c[0] in args.batches]
                if args.tiny:
                    cases = [(b, n, 8, t) for b, n, _, t in cases]
                note("throughput", measure_throughput(llm, cases, args.repeat))
            if "mixed" in parts:
                note("mixed", measure_mixed(llm, args.repeat))
            note("llm_graphs", graph_report(llm))
    if "ready" in parts:
        note("ready", measure_ready(args))
    print(json.dumps(report, indent=2))


IMPORTED = time.process_time()
if __name__ == "__main__":
    main()
