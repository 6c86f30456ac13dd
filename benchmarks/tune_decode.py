"""How the kernels of a decode step are best cut, on this GPU: products, attention, a layer's products, whole steps.

Everything is compiled beforehand, by as many processes as there are cores. Each variant is compared with its twin
before it is timed. Results go to the file as they come; at the end the best of each product is printed beside what is
built in.

    python benchmarks/tune_decode.py [--sections products layers step attention] [--json FILE] [--seconds 240]

What to change for which outcome:

- products: `choose_token_tile` in core/mrv2/kernels/token_tile.py and `choose_vector_tile` in vector_tile.py; where the
  sum over a layer (`layers`) is below cuBLAS's: `FROM_TOKENS`, and in core/mrv2/layers/fused.py the bounds on tokens.
- attention: `choose_tile` and `choose_splits` in core/mrv2/kernels/decode_splits.py.
- step: `DEPENDENT_TOKENS` and `EARLY_TOKENS` in core/mrv2/kernels/dependent.py, where `dependent` is quicker and
  `same_tokens` true.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import torch
from timing import copy_bandwidth, environment
from tune_attention import attention_cases
from tune_products import best_products, measure_layers, product_cases
from tune_step import BATCHES, WAYS, generate, measure_steps, random_model
from tuning import Case, Report, compile_share, measure

SECTIONS = {"products": 0.65, "layers": 0.7, "step": 0.9, "attention": 1.0}
"""In their order, and the share of the time after which each ends."""


def cases_of(sections: list[str]) -> list[Case]:
    found = list(product_cases()) if "products" in sections else []
    return found + (list(attention_cases()) if "attention" in sections else [])


def compile_all(sections: list[str], seconds: float) -> None:
    """In processes of their own, which leave the results in Triton's cache. What is left over is compiled later."""
    jobs = min(15, max(1, (os.cpu_count() or 2) - 1))
    kernels = [name for name in sections if name in ("products", "attention")]
    steps = [["--warm", name] for name in WAYS] if "step" in sections else []
    shares = max(2, jobs - len(steps)) if kernels else 0
    commands = [["--sections", *kernels, "--compile", str(i), str(shares)] for i in range(shares)] + steps
    running = [subprocess.Popen([sys.executable, __file__, *more], stdout=subprocess.DEVNULL) for more in commands]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--seconds", type=float, default=240, help="stop beginning new cases after so long")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.compile:
        with torch.inference_mode():
            compile_share(cases_of(args.sections), *args.compile)
        return
    if args.warm:
        model = random_model(num_hidden_layers=1)
        for batch in BATCHES:
            generate(model, batch, WAYS[args.warm], new=3)
        return
    start = time.monotonic()
    report = Report({"benchmark": "tune_decode", **environment(torch.device("cuda", 0))}, args.json, args.seconds)
    compile_all(args.sections, 0.4 * args.seconds)
    report.note("compile_s", round(time.monotonic() - start, 1), append=False)
    copy = copy_bandwidth()
    report.note("copy_bytes_per_s", round(copy), append=False)
    torch.cuda.empty_cache()
    for section, share in SECTIONS.items():
        if section not in args.sections:
            continue
        report.share = share
        try:
            with torch.inference_mode():
                if section == "layers":
                    measure_layers(report, copy)
                elif section != "step":
                    measure(cases_of([section]), section, copy, report)
            if section == "step":
                measure_steps(report)
        except Exception as error:  # the other sections have something to say
            report.note("errors", f"{section}: {type(error).__name__}: {error}"[:300])
    report.note("best", best_products(report.document), append=False)
    for section in ("layers", "step", "errors"):
        for row in report.document.get(section, []):
            print(section, json.dumps(row))


if __name__ == "__main__":
    main()
