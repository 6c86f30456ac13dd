"""Tokens per second with detokenised text and without: ids only, final text, and as many streams in one event loop.

On a CPU a model that does nothing stands in. Its steps take a given time in which the host is free, as with a GPU,
and a given number of small torch operations before that, as eager launches would; its tokens spell real text.
On a GPU, or with `--tiny`, the model has Qwen3's shape and random bf16 weights. Prints one JSON document.

    python benchmarks/text.py --device cpu --model smollm2 [--step-ms 4 10] [--launches 0 600]
    python benchmarks/text.py --device cuda [--requests 256] [--rounds 5] [--json benchmarks/results/text-h200.json]

The tokenizer is that of `--model`; without it, a byte-level one of the model's vocabulary size, made on the spot.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import tokenizers
import torch
import transformers
from random_model import SHAPE, TINY, make_model
from timing import environment

import mrv2.frontend.llm as llm_module
from mrv2 import LLM, SamplingParams
from mrv2.frontend.build import EngineParts, LoadedModel, assemble
from mrv2.frontend.engine_config import EngineConfig
from mrv2.loader.model import resolve_model
from mrv2.loader.tokenizer import FolderTokenizer
from mrv2.runner.engine import Engine
from mrv2.runner.outputs import StepOutput
from mrv2.state.plan import StepPlan
from mrv2.testing.null_model import null_model

MODES = ("ids", "final", "stream")
TEXT = (
    "The step loop plans ahead — naïve readers wait, 読者は待つ, читатели ждут 🙂.\n\n    return x[i] + 1.5e-3  # ok\n"
)


def made_up_tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
    """Single bytes, then words of four to eight letters."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġ{'bcdfgklmnprstv'[i % 14]}{i:x}o" for i in range(vocab_size - len(alphabet))]
    vocab = {token: i for i, token in enumerate([*alphabet, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def make_tokenizer(args: argparse.Namespace, folder: Path) -> FolderTokenizer:
    if args.model:
        return FolderTokenizer(resolve_model(args.model).path)
    made_up_tokenizer((TINY if args.tiny else SHAPE)["vocab_size"]).save_pretrained(folder)
    return FolderTokenizer(folder)


# -- a model that takes time ---------------------------------------------------------------------------


class TimedEngine(Engine):
    """Steps follow each other on a device that doesn't exist, each for `step_ms`; outputs are a text's tokens."""

    def __init__(self, parts: EngineParts, *, step_ms: float, launches: int, text_ids: list[int]) -> None:
        super().__init__(parts.engine.scheduler, parts.engine._runner, depth=2)
        self._seconds, self._launches = step_ms / 1e3, launches
        self._text_np = np.array(text_ids, np.int64)
        self._free_at = 0.0
        self._some = torch.zeros(8)

    def _launch(self, plan: StepPlan) -> Any:
        output = super()._launch(plan).wait()
        for _ in range(self._launches):
            self._some.add_(1)
        self._free_at = max(time.perf_counter(), self._free_at) + self._seconds
        tokens_np = self._text_np[(plan.rows_np * 37 + plan.step_id) % len(self._text_np)][:, None]
        return TimedOutput(replace(output, tokens_np=tokens_np), self._free_at)


class TimedOutput:
    """An output that is there at a given time."""

    def __init__(self, output: StepOutput, ready_at: float) -> None:
        self._output, self._ready_at = output, ready_at

    def wait(self) -> StepOutput:
        """Wait without the interpreter's lock, as for a GPU."""
        time.sleep(max(0.0, self._ready_at - time.perf_counter()))
        return self._output


# -- one LLM per mode ----------------------------------------------------------------------------------


def make_llms(args: argparse.Namespace, step_ms: float, launches: int, folder: Path) -> dict[str, LLM]:
    """The same model once without a tokenizer and twice with it."""
    settings = {
        "device": args.device,
        "max_num_seqs": args.requests,
        "max_num_tokens": max(args.max_num_tokens, args.requests),
        "max_model_len": args.prompt_tokens + args.new_tokens + 1,
        "max_queue": None,
        "prefix_caching": False,
        "seed": 0,
    }
    tokenizer, make = make_tokenizer(args, folder / "tokenizer"), assemble
    if args.stand_in:
        loaded = null_model(max_model_len=settings["max_model_len"], tokenizer=tokenizer)

        def make(model: LoadedModel, config: EngineConfig) -> EngineParts:
            parts, text_ids = assemble(model, config), tokenizer.encode(TEXT)
            return replace(parts, engine=TimedEngine(parts, step_ms=step_ms, launches=launches, text_ids=text_ids))

    else:
        shape = (TINY if args.tiny else SHAPE) | ({"vocab_size": len(tokenizer.hf)} if args.model else {})
        loaded = replace(make_model(shape, torch.device(args.device), folder / "model"), tokenizer=tokenizer)
    llms = {}
    for mode in MODES:
        model = replace(loaded, tokenizer=None) if mode == "ids" else loaded
        llm_module.load, llm_module.assemble = (lambda *_, model=model: model), make
        llms[mode] = LLM(mode, **settings)
    return llms


# -- runs ----------------------------------------------------------------------------------------------


def run_batch(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> int:
    """Tokens that came."""
    return sum(len(result.outputs[0].token_ids) for result in llm.generate(prompts, params))


def run_streams(llm: LLM, prompts: list[list[int]], params: SamplingParams, pieces: list[int]) -> int:
    """The same through one event loop, with every piece looked at."""

    async def one(prompt: list[int]) -> int:
        text, tokens = [], 0
        async for piece in llm.stream(prompt, params):
            text.append(piece.text)
            tokens += len(piece.token_ids)
        pieces.append(len(text))
        assert piece.finished is not None
        assert "".join(text) == piece.finished.outputs[0].text
        return tokens

    async def everything() -> int:
        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    return asyncio.run(everything())


def measure(args: argparse.Namespace, llms: dict[str, LLM]) -> dict[str, Any]:
    """Rates by mode, in turns, and those with text over the one without."""
    rates: dict[str, list[float]] = {mode: [] for mode in MODES}
    pieces: list[int] = []
    for n in range(-1, args.rounds):
        for mode in MODES[:: 1 if n % 2 else -1]:
            params = SamplingParams(max_tokens=args.new_tokens if n >= 0 else 4, ignore_eos=True)
            prompts = [prompt(i, args.prompt_tokens, llms[mode].limits.vocab_size) for i in range(args.requests)]
            gc.collect()
            start = time.perf_counter()
            if mode == "stream":
                tokens = run_streams(llms[mode], prompts, params, pieces)
            else:
                tokens = run_batch(llms[mode], prompts, params)
            seconds = time.perf_counter() - start
            assert tokens == args.requests * params.max_tokens
            if n >= 0:
                rates[mode].append(tokens / seconds)
    median = {mode: round(statistics.median(seen), 1) for mode, seen in rates.items()}
    over = {f"{mode}_over_ids": round(median[mode] / median["ids"], 3) for mode in MODES[1:]}
    return {
        "tokens_per_second": median,
        **over,
        "tokens_per_piece": round(args.new_tokens / statistics.median(pieces[args.requests :]), 1),
        "rounds": {mode: [round(r, 1) for r in seen] for mode, seen in rates.items()},
    }


def prompt(i: int, length: int, vocab_size: int) -> list[int]:
    """Ids that differ from request to request."""
    return [(i * 7919 + k * 104729) % vocab_size for k in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="whose tokenizer to use: a folder or a bundled name")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--max-num-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[4.0, 10.0], help="on a CPU: a step's time")
    parser.add_argument("--launches", type=int, nargs="+", default=[0], help="on a CPU: torch operations a step")
    parser.add_argument("--tiny", action="store_true", help="a small shape, also on a CPU, to try the script")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.stand_in = args.device == "cpu" and not args.tiny
    head = environment(torch.device(args.device))
    head["versions"] |= {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
    report: dict[str, Any] = {
        "benchmark": "text",
        **head,
        "cores": os.cpu_count(),
        "requests": args.requests,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "results": [],
    }
    for step_ms in args.step_ms if args.stand_in else [0.0]:
        for launches in args.launches if args.stand_in else [0]:
            with tempfile.TemporaryDirectory() as folder:
                llms = make_llms(args, step_ms, launches, Path(folder))
            try:
                result = measure(args, llms)
            finally:
                for llm in llms.values():
                    llm.close()
            report["results"].append(({"step_ms": step_ms, "launches": launches} if args.stand_in else {}) | result)
            print(json.dumps(report["results"][-1]), file=sys.stderr, flush=True)
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
