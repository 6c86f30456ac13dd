"""A step on a GPU, eager: input preparation, the host's share, and tokens per second with and without text.

The model has Qwen3-0.6B's shape and random bf16 weights; the tokenizer is a made-up byte-level one of the same
vocabulary, so that nothing has to be downloaded. Prints one JSON document.

    python benchmarks/gpu_step.py [--requests 1 32 256] [--json benchmarks/results/gpu_step-h200.json] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mrv2.config import load_model_config
from mrv2.frontend.driver import Driver
from mrv2.frontend.output_processor import ResultFuture, Ticket
from mrv2.layers.native import NativeLayers
from mrv2.loader.load import build_model
from mrv2.loader.tokenizer import load_tokenizer
from mrv2.model_state.default import DefaultModelState
from mrv2.registry import Registry
from mrv2.runner.build import EngineConfig, EngineParts, LoadedModel, assemble
from mrv2.runner.outputs import PendingOutput
from mrv2.sample.params import SamplingParams
from mrv2.state.plan import StepPlan

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
PROMPT, NEW, WARMUP = 128, 128, 16
MAX_MODEL_LEN = 512
RING = 3
"""Preparations enqueued at a time: fewer than there are staging buffers, so that the host never waits between."""


def make_model(shape: dict[str, Any], device: torch.device, folder: Path) -> LoadedModel:
    """The model with random weights, and a tokenizer with as many tokens."""
    config = transformers.Qwen3Config(**shape, architectures=["Qwen3ForCausalLM"], dtype="bfloat16")
    config.save_pretrained(folder)
    make_tokenizer(shape["vocab_size"]).save_pretrained(folder)
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
        tokenizer=load_tokenizer(model_config.context(), adapter),
        adapter=adapter.name,
        chunked_prefill=True,
        prefix_caching=False,
    )


def make_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Single bytes, then words of four to eight letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{'bcdfgklmnprstv'[i % 14]}{i:x}o" for i in range(vocab_size - len(alphabet))]
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_engine(model: LoadedModel, num_reqs: int, device: torch.device) -> EngineParts:
    return assemble(
        model,
        EngineConfig(
            device=str(device), max_num_seqs=num_reqs, max_num_tokens=max(2048, num_reqs), max_model_len=MAX_MODEL_LEN
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


# -- decode steps: wall, host, device --------------------------------------------------------------------


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


# -- input preparation -----------------------------------------------------------------------------------


def input_preparation(parts: EngineParts, rounds: int) -> dict[str, Any]:
    """Device time of one decode step's input preparation, by events around launches that are queued already."""
    runner: Any = parts.engine._runner
    plan = drained_plan(parts)

    @torch.inference_mode()
    def prepare() -> None:
        runner._buffers.prepare(plan, runner._requests, runner._tables)

    for _ in range(10):
        prepare()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # some ten milliseconds, in which the host fills the queue
        first.record()
        for _ in range(RING):
            prepare()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) / RING * 1e3)
    return {
        "events_us": round(statistics.median(times), 2),
        "kernels_us": kernel_times(prepare, 20),
        "host_us": round(host_time(prepare, 200), 1),
    }


def drained_plan(parts: EngineParts) -> StepPlan:
    """The next decode step's plan, with nothing in flight."""
    engine = parts.engine
    while engine._in_flight:
        plan, pending = engine._in_flight.popleft()
        engine.scheduler.update(plan, pending.wait())
    plan = engine.scheduler.plan()
    assert plan is not None
    torch.cuda.synchronize()
    return plan


def kernel_times(run: Callable[[], None], repeats: int) -> dict[str, float]:
    """Microseconds that each kernel and copy takes per run."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
    times = {e.key[:72]: round(e.self_device_time_total / repeats, 2) for e in profile.key_averages()}
    times = {name: t for name, t in times.items() if t > 0}
    return times | {"sum": round(sum(times.values()), 2)}


def host_time(run: Callable[[], None], repeats: int) -> float:
    """Microseconds of the host per run."""
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    elapsed = (time.perf_counter() - start) / repeats * 1e6
    torch.cuda.synchronize()
    return elapsed


# -- with text -------------------------------------------------------------------------------------------


def with_text(model: LoadedModel, num_reqs: int, device: torch.device, mode: str) -> float:
    """Tokens per second of whole requests through the driver.

    Args:
        model: to run.
        num_reqs: requests, all at once.
        device: to run on.
        mode: "ids": no text; "final": text at the end; "stream": text with every token.
    """
    parts = make_engine(model, num_reqs, device)
    driver = Driver(parts.engine, None if mode == "ids" else model.tokenizer)
    vocab_size = model.config.vocab_size

    def generate(name: str, max_tokens: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        tickets = [
            Ticket(
                request=parts.intake.request(f"{name}{i}", prompt(i, vocab_size), params, watched=mode == "stream"),
                prompt=None,
                future=ResultFuture(f"{name}{i}"),
                on_piece=(lambda piece: None) if mode == "stream" else None,
            )
            for i in range(num_reqs)
        ]
        start = time.perf_counter()
        driver.submit(tickets)
        tokens = sum(len(ticket.future.result().outputs[0].token_ids) for ticket in tickets)
        return tokens / (time.perf_counter() - start)

    generate("warm", 4)
    gc.collect()  # engines before this one
    rate = generate("timed", NEW)
    driver.close()
    return rate


def text_rates(model: LoadedModel, num_reqs: int, device: torch.device, rounds: int) -> dict[str, Any]:
    """Rates by mode, in turns, and those with text over the one without."""
    rates: dict[str, list[float]] = {"ids": [], "final": [], "stream": []}
    for n in range(rounds):
        for mode in list(rates)[:: 1 if n % 2 else -1]:
            rates[mode].append(with_text(model, num_reqs, device, mode))
    median = {mode: round(statistics.median(seen), 1) for mode, seen in rates.items()}
    shares = {f"{mode}_over_ids": round(median[mode] / median["ids"], 3) for mode in ("final", "stream")}
    return median | shares | {"rounds": {mode: [round(r, 1) for r in seen] for mode, seen in rates.items()}}


def measure(model: LoadedModel, num_reqs: int, device: torch.device, args: argparse.Namespace) -> dict[str, Any]:
    parts = make_engine(model, num_reqs, device)
    backend = type(parts.engine._runner._forward._backend).__name__
    start_decoding(parts, num_reqs, model.config.vocab_size)
    result: dict[str, Any] = {"requests": num_reqs, "backend": backend, "decode": decode_steps(parts, args.steps)}
    if device.type == "cuda":
        result["decode"] |= profile_steps(parts, 5)
        result["input_preparation"] = input_preparation(parts, 30)
    del parts
    if num_reqs in args.text:
        result["tokens_per_second_of_whole_requests"] = text_rates(model, num_reqs, device, args.rounds)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--text", type=int, nargs="*", default=[256], help="of these, where text is measured too")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(TINY if args.tiny else SHAPE, device, Path(folder))
    report: dict[str, Any] = {
        "benchmark": "gpu_step",
        "command": shlex.join(["python", *sys.argv]),
        "card": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version(), **triton_version()},
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


def triton_version() -> dict[str, str]:
    try:
        import triton
    except ImportError:
        return {}
    return {"triton": triton.__version__}


if __name__ == "__main__":
    main()
