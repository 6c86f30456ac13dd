"""An adapter inside vLLM beside vLLM's own class of the same model: the same tokens, and the same speed?

Qwen3-0.6B's shape with random weights, in one checkpoint that both arms load: vLLM's `Qwen3ForCausalLM`, and the qwen
adapter as `Mrv2Qwen3ForCausalLM`; with `--family llama` the same without norms of queries and keys, as Llama's classes.
Both run in Model Runner V2 with the same settings and with CUDA graphs.

1. float32: greedy tokens of 8 prompts of different lengths are equal.
2. bfloat16: log-probabilities of the same texts (which vLLM's class has sampled) and the best token at each position;
   as a control the same of vLLM's class started once more, and of each arm asked twice: how far the same code is from
   itself.
3. bfloat16: tokens per second, the arms taking turns, medians.

    python benchmarks/vllm_host.py [--family llama] [--tp 2] [--parts tokens logprobs speed]
        [--json benchmarks/results/vllm_host-h200.json] [--seconds 540]

Needs a GPU and vLLM (vllm_site.sh installs what was brought along); `--tiny` runs every line on a CPU. The file is
written after each part, and logs of the arms beside it. An arm that fails or takes too long shows the end of its log,
and the rest goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from random_model import SHAPE
from safetensors.torch import save_file
from timing import environment
from vllm_process import START_SECONDS, STEP_SECONDS, Arm, ArmError

FAMILIES = {"qwen": transformers.Qwen3Config, "llama": transformers.LlamaConfig}
CLASSES = {"qwen": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
ARMS = {"theirs": "", "ours": "Mrv2", "again": ""}
"""What stands before vLLM's class in the name of the arm's. `again` is vLLM's own class started once more."""
TINY_SHAPE = SHAPE | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
}
STD = 0.02
"""Of all weights but norms'."""
PEAK = 8.0
"""Weight of the last norm. With 1, logits have a standard deviation of 0.64 and all tokens about the same probability;
with this, of 5: the best token has a third of it, and is a nat above the next, about as in a trained model."""
LENS = (1, 3, 17, 33, 70, 100, 5, 12)
PENALTY = 2.0
"""In float32: logits lose as much for each time that their token was generated; gaps are those after it."""
CLEAR = 0.125
"""Nats between the best tokens from which on the best is clear: the spacing of bfloat16 logits of their size."""
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]
CASES = ((32, 32, 512, 0.0), (256, 32, 512, 0.0), (256, 32, 512, 1.0))
"""Requests, tokens in, tokens out, temperature."""
TINY_CASES = ((2, 4, 8, 0.0), (4, 4, 8, 0.0))
MAX_ROUNDS = 7
Row = tuple[float, int, float, float]
"""See `Arm.score` in vllm_arm.py."""

DTYPES = {"tokens": "float32", "logprobs": "bfloat16", "speed": "bfloat16"}
"""The parts, and what they run in."""


# -- what the arms load --------------------------------------------------------------------------------------


def make_checkpoint(folder: Path, family: str, shape: dict[str, Any]) -> None:
    """Config and weights, bfloat16: both types compute with the same values."""
    config = FAMILIES[family](**shape, architectures=[CLASSES[family]], dtype="bfloat16")
    config.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in parameters(shape, qk_norm=family == "qwen").items():
        if len(size) == 1:
            value = torch.full(size, PEAK if name == "model.norm.weight" else 1.0)
        else:
            value = torch.empty(size).normal_(0, STD, generator=generator)
        tensors[name] = value.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def parameters(shape: dict[str, Any], *, qk_norm: bool) -> dict[str, tuple[int, ...]]:
    """Of a checkpoint with a tied head, by name."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    if qk_norm:
        layer |= {f"self_attn.{name}_norm": (head,) for name in "qk"}
    ends = {"model.embed_tokens.weight": (shape["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    numbers = range(shape["num_hidden_layers"])
    return ends | {f"model.layers.{i}.{name}.weight": size for i in numbers for name, size in layer.items()}


def engine_settings(args: argparse.Namespace, folder: Path, arm: str, dtype: str) -> dict[str, Any]:
    """The same for both arms but for the class. Fixed cache sizes: all engines are there at once."""
    exact = dtype == "float32"
    gib = 0.0625 if args.tiny else 2 if exact else 20
    settings = {
        "model": str(folder),
        "hf_overrides": {"architectures": [ARMS[arm] + CLASSES[args.family]]},
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "max_model_len": 1024,
        "max_num_seqs": 8 if exact or args.tiny else 256,
        "max_num_batched_tokens": 2048 if exact or args.tiny else 8192,
        "kv_cache_memory_bytes": int(gib * 2**30),
        "gpu_memory_utilization": 0.2,
        "enable_prefix_caching": False,
        "tensor_parallel_size": args.tp,
        "disable_log_stats": True,
        "seed": 0,
        "logprobs_mode": "processed_logprobs" if exact else "raw_logprobs",
    }
    if args.tiny:
        return settings | {"enforce_eager": True, "block_size": 32}
    sizes = [n for n in CAPTURED if n <= settings["max_num_seqs"]]
    return settings | {"async_scheduling": True, "compilation_config": {"cudagraph_capture_sizes": sizes}}


def arm_environment(work: Path, index: int, dtype: str) -> dict[str, str]:
    """Each arm with caches and ports of its own; no network; no NVLink multicast. In float32 exact products also in
    vLLM's attention, which else rounds its input to 10 bits: a difference in the last bit then comes out a thousand
    times larger.
    """
    given = {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_CACHE_ROOT": str(work / f"cache{index}"),
        "VLLM_PORT": str(21000 + 1000 * index),
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `facts` is a function
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    default = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if dtype == "float32":
        given["TRITON_F32_DEFAULT"] = "ieee"
    return default | dict(os.environ) | given


# -- the parts ------------------------------------------------------------------------------------------------


def compare_tokens(theirs: Arm, ours: Arm, vocab: int, n: int) -> dict[str, Any]:
    """Greedy tokens of a ragged batch. The penalty keeps the model from repeating a few tokens for ever."""
    rng = random.Random(0)
    prompts = [[rng.randrange(vocab) for _ in range(length)] for length in LENS]
    for arm in (theirs, ours):
        arm.send("generate", prompts=prompts, n=n, frequency_penalty=PENALTY)
    want, got = theirs.answer(STEP_SECONDS), ours.answer(STEP_SECONDS)
    differences = []
    for i, (w, g) in enumerate(zip(want, got, strict=True)):
        at = next((j for j, (a, b) in enumerate(zip(w["tokens"], g["tokens"], strict=True)) if a != b), None)
        if at is not None:
            differences.append({"prompt": i, "token": at, "gap_nats": w["gaps"][at]})
    return {
        "prompts": len(prompts),
        "tokens_each": n,
        "prompts_equal": len(prompts) - len(differences),
        "first_differences": differences,
        "smallest_gap_nats": min(gap for w in want for gap in w["gaps"]),
        "different_tokens": len({t for w in want for t in w["tokens"]}),
    }


def compare_logprobs(
    theirs: Arm, ours: Arm, again: Arm, vocab: int, texts: int, length: int, temperature: float
) -> dict[str, Any]:
    """Teacher-forced: all score texts that vLLM's own class has sampled, twice."""
    rng = random.Random(1)
    prompts = [[rng.randrange(vocab) for _ in range(8)] for _ in range(texts)]
    sampled = theirs.ask("generate", prompts=prompts, n=length - 8, temperature=temperature, seed=0)
    whole = [[*p, *s["tokens"]] for p, s in zip(prompts, sampled, strict=True)]
    arms = (theirs, ours, again)
    scores = []
    for _ in range(2):
        for arm in arms:
            arm.send("score", texts=whole)
        scores.append([[row for text in arm.answer(STEP_SECONDS) for row in text] for arm in arms])
    (want, got, other), twice = scores
    found = agreement(want, got)
    return found | {
        "control": {
            "vllm_started_again": agreement(want, other),
            "vllm_asked_twice": agreement(want, twice[0]),
            "ours_asked_twice": agreement(got, twice[1]),
        },
        "reference": {
            "median_gap_nats": statistics.median(w[3] for w in want),
            "mean_top1_logprob": statistics.fmean(w[2] for w in want),
            "mean_chosen_logprob": statistics.fmean(w[0] for w in want),
        },
        "passes": found["chosen_logprob_difference"]["mean"] <= 0.05 and found["top1_agreement"] >= 0.99,
    }


def agreement(want: list[Row], got: list[Row]) -> dict[str, Any]:
    """Of two scores of the same texts."""
    deltas = [abs(w[0] - g[0]) for w, g in zip(want, got, strict=True)]
    same = [w[1] == g[1] for w, g in zip(want, got, strict=True)]
    clear = [w[3] > CLEAR for w in want]
    return {
        "positions": len(deltas),
        "chosen_logprob_difference": {"mean": statistics.fmean(deltas), "max": max(deltas)},
        "positions_bit_equal": statistics.fmean(d == 0 for d in deltas),
        "top1_agreement": statistics.fmean(same),
        "clear_positions": sum(clear),
        "top1_agreement_where_clear": statistics.fmean(s for s, c in zip(same, clear, strict=True) if c),
    }


def compare_speed(
    theirs: Arm, ours: Arm, cases: tuple[tuple[int, int, int, float], ...], until: float, save: Callable[[Any], None]
) -> None:
    """The arms take turns, in each round in the other order; saved after every round."""
    arms = {"theirs": theirs, "ours": ours}
    for batch, isl, _, temperature in cases:
        for arm in arms.values():
            arm.ask("measure", batch=batch, isl=isl, osl=min(batch, 16), temperature=temperature, seed=0)
    seconds: dict[tuple[Any, ...], dict[str, list[float]]] = {case: {name: [] for name in arms} for case in cases}
    slowest = 0.0
    for number in range(MAX_ROUNDS):
        began = time.perf_counter()
        if number and time.perf_counter() + 1.2 * slowest > until:
            break
        for case in cases:
            batch, isl, osl, temperature = case
            for name in sorted(arms, reverse=bool(number % 2)):
                took = arms[name].ask(
                    "measure", batch=batch, isl=isl, osl=osl, temperature=temperature, seed=1 + number
                )
                seconds[case][name].append(took)
        slowest = max(slowest, time.perf_counter() - began)
        save([speed_row(case, runs) for case, runs in seconds.items()])


def speed_row(case: tuple[int, int, int, float], runs: dict[str, list[float]]) -> dict[str, Any]:
    batch, isl, osl, temperature = case
    middle = {name: statistics.median(times) for name, times in runs.items()}
    return {
        "batch": batch,
        "in": isl,
        "out": osl,
        "temperature": temperature,
        "seconds": {name: [round(t, 4) for t in times] for name, times in runs.items()},
        "tokens_per_second": {name: round(batch * osl / t) for name, t in middle.items()},
        "ms_per_step": {name: round(t / osl * 1e3, 3) for name, t in middle.items()},
        "ratio": round(middle["theirs"] / middle["ours"], 4),
    }


# -- all of it ------------------------------------------------------------------------------------------------


def start(arms: dict[str, Arm], seconds: float) -> dict[str, Any]:
    """Wait for both, so that one which fails shows its log even if the other does too.

    Raises:
        ArmError: of the first that failed.
    """
    until, facts, errors = time.perf_counter() + seconds, {}, []
    for name, arm in arms.items():
        try:
            facts[name] = arm.answer(until - time.perf_counter())
        except ArmError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return facts


def run(args: argparse.Namespace, work: Path, result: dict[str, Any], save: Callable[[], None]) -> None:
    until = time.perf_counter() + args.seconds
    shape = TINY_SHAPE if args.tiny else SHAPE
    engines: dict[str, dict[str, Arm]] = {}
    for i, dtype in enumerate(dict.fromkeys(DTYPES[part] for part in args.parts)):
        engines[dtype] = {
            arm: Arm(
                f"{arm} {dtype}",
                engine_settings(args, work / "model", arm, dtype),
                arm_environment(work, len(ARMS) * i + j, dtype),
                args.json.with_suffix(f".{arm}-{dtype}.log") if args.json else work / f"{arm}-{dtype}.log",
            )
            for j, arm in enumerate(ARMS)
            if arm != "again" or ("logprobs" in args.parts and dtype == DTYPES["logprobs"])
        }
    try:
        make_checkpoint(work / "model", args.family, shape)
        for arms in engines.values():
            for arm in arms.values():
                arm.send("start")
        vocab = shape["vocab_size"]

        def part(name: str, work_of: Callable[..., Any]) -> None:
            if name not in args.parts:
                return
            dtype = DTYPES[name]
            arms = engines[dtype]
            try:
                if f"engines_{dtype}" not in result:
                    result[f"engines_{dtype}"] = start(arms, min(START_SECONDS, until - time.perf_counter()))
                found = work_of(**arms)
                if found is not None:
                    result[name] = found
            except ArmError as error:
                result.setdefault("errors", {})[name] = str(error)
            save()
            print(name, json.dumps(result.get(name, result.get("errors"))), flush=True)

        def keep(rows: Any) -> None:
            result["speed"] = rows
            save()

        n = 8 if args.tiny else 64
        part("tokens", lambda **arms: compare_tokens(**arms, vocab=vocab, n=n))
        for arm in engines.get("float32", {}).values():
            arm.close()
        # Triton's interpreter can't do the random numbers of 0.26.
        how = (
            {"texts": 3, "length": 24, "temperature": 0.0}
            if args.tiny
            else {"texts": 32, "length": 256, "temperature": 1.0}
        )
        part("logprobs", lambda **arms: compare_logprobs(**arms, vocab=vocab, **how))
        if control := engines.get(DTYPES["speed"], {}).pop("again", None):
            control.close()
        cases = TINY_CASES if args.tiny else CASES
        part("speed", lambda **arms: compare_speed(**arms, cases=cases, until=until, save=keep))
    finally:
        for arms in engines.values():
            for arm in arms.values():
                arm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="qwen")
    parser.add_argument("--tp", type=int, default=1, help="GPUs per engine")
    parser.add_argument("--parts", nargs="+", choices=DTYPES, default=list(DTYPES), help="what to measure")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--seconds", type=float, default=540, help="when to stop measuring")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU: tries the script, measures nothing")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the arms are ended too
    result = environment(torch.device("cpu" if args.tiny else "cuda"))
    result["versions"] |= {"vllm": version("vllm"), "transformers": transformers.__version__}
    result |= {"family": args.family, "tensor_parallel_size": args.tp, "final_norm_weight": PEAK}

    def save() -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="vllm-host-") as work:
        run(args, Path(work), result, save)
    print(json.dumps(result, indent=1))
    sys.exit(1 if "errors" in result else 0)


if __name__ == "__main__":
    main()
