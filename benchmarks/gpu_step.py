"""A decode step on a GPU, eager: its time, the host's share, and the kernels that take longest.

The model has Qwen3-0.6B's shape and random bf16 weights, so that nothing has to be downloaded. Prints one JSON
document. Rates with text are another benchmark's: `text.py`.

    python benchmarks/gpu_step.py [--requests 1 32 256] [--json benchmarks/results/gpu_step-h200.json] [--tiny]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import environment

from mrv2.config import load_model_config
from mrv2.frontend.build import EngineConfig, EngineParts, LoadedModel, assemble
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import build_model
from mrv2.model_state.default import DefaultModelState
from mrv2.registry import Registry
from mrv2.runner.outputs import PendingOutput
from mrv2.sample.params import SamplingParams

SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}
TINY = SHAPE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
PROMPT, WARMUP = 128, 16
MAX_MODEL_LEN = 512


def make_model(shape: dict[str, Any], device: torch.device, folder: Path) -> LoadedModel:
    """The model with random weights, and a tokenizer with as many tokens."""
    config = transformers.Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    registry = Registry.discover()
    model_config = load_model_config(folder, registry)
    adapter = registry.resolve(model_config.architecture)
    layers = NativeLayers()
    module = build_model(model_config, adapter, layers, device=device, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    layers.finalize(module)
    return LoadedModel(
        name="random",
        module=module,
        caches=layers.caches,
        rope_fixed_up_to=None,
        state_class=DefaultModelState,
        config=model_config,
        tokenizer=None,
        adapter=adapter.name,
        chunked_prefill=True,
        prefix_caching=False,
    )


def make_engine(model: LoadedModel, num_reqs: int, device: torch.device) -> EngineParts:
    return assemble(
        model,
        EngineConfig(
            device=str(device),
            max_num_seqs=num_reqs,
            max_num_tokens=max(2048, num_reqs),
            max_model_len=MAX_MODEL_LEN,
            graphs=False,
        ),
    )


def prompt(i: int, vocab_size: int) -> list[int]:
    return [(i * 7919 + k * 104729) % vocab_size for k in range(PROMPT)]


def start_decoding(parts: EngineParts, num_reqs: int, vocab_size: int) -> None:
    """Requests that are all past their prompts, a few steps in."""
    params = SamplingParams(temperature=0, max_tokens=MAX_MODEL_LEN - PROMPT - 1)
    parts.engine.add(parts.intake.request(str(i), prompt(i, vocab_size), params) for i in range(num_reqs))
    while parts.engine.scheduler.stats.generated_tokens < num_reqs * WARMUP:
        parts.engine.step()
    assert parts.engine.scheduler.num_running == num_reqs


def decode_steps(parts: EngineParts, steps: int) -> dict[str, float]:
    """Wall time of a decode step, and how much of it the host was busy: all but the wait for an output."""
    waited, wait = [0.0], PendingOutput.wait

    def timed(pending: PendingOutput) -> Any:
        start = time.perf_counter()
        output = wait(pending)
        waited[0] += time.perf_counter() - start
        return output

    PendingOutput.wait = timed  # type: ignore[method-assign]
    generated, start = parts.engine.scheduler.stats.generated_tokens, time.perf_counter()
    for _ in range(steps):
        parts.engine.step()
    wall = time.perf_counter() - start
    PendingOutput.wait = wait  # type: ignore[method-assign]
    tokens = parts.engine.scheduler.stats.generated_tokens - generated
    return {
        "step_ms": round(wall / steps * 1e3, 3),
        "host_ms": round((wall - waited[0]) / steps * 1e3, 3),
        "tokens_per_second": round(tokens / wall, 1),
    }


def profile_steps(parts: EngineParts, steps: int) -> dict[str, Any]:
    """Device time of a decode step, and the kernels that take most of it, in microseconds a step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            parts.engine.step()
        torch.cuda.synchronize()
    totals = sorted(((e.self_device_time_total / steps, e.key) for e in profile.key_averages()), reverse=True)
    return {
        "device_us": round(sum(t for t, _ in totals), 1),
        "launches": sum(e.count for e in profile.key_averages()) // steps,
        "longest_us": {name[:72]: round(t, 1) for t, name in totals[:12]},
    }


def measure(model: LoadedModel, num_reqs: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    parts = make_engine(model, num_reqs, device)
    backend = type(parts.engine._runner._forward._backend).__name__
    start_decoding(parts, num_reqs, model.config.vocab_size)
    result: dict[str, Any] = {"requests": num_reqs, "backend": backend, "decode": decode_steps(parts, args.steps)}
    if device.type == "cuda":
        result["decode"] |= profile_steps(parts, 5)
    del parts
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(TINY if args.tiny else SHAPE, device, Path(folder))
    report: dict[str, Any] = {
        "benchmark": "gpu_step",
        **environment(device),
        "shape": TINY if args.tiny else SHAPE,
        "prompt_tokens": PROMPT,
        "results": [],
    }
    for num_reqs in args.requests:
        report["results"].append(measure(model, num_reqs, device, args))
        print(json.dumps(report["results"][-1], indent=1), file=sys.stderr, flush=True)
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
