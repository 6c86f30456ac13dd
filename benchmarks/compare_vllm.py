"""mrv2 and vLLM on the same workloads, on the same machine, in one go: arms take turns, each in a process of its own.

    python benchmarks/compare_vllm.py BENCH.py --json OUT.json [--site FOLDER] [--arms ours v2 v1 ours]
        [--cases decode,yardstick] [--batches 1 32 256] [--repeat 3] [--seconds 540] [--append]

BENCH.py measures vLLM: `BENCH.py {1|2} OUT.json --cases … --repeat …` for its old and its new runner. mrv2's arms run
the same file with `as_vllm/vllm.py` in vLLM's place, so cases, prompts, their order, and what lies between start and
stop of the clock are the same on both sides. FOLDER has vLLM and what it needs, and comes before all else in its arms.

vLLM takes some 80 seconds to start, so a call of ten minutes holds three or four of its arms. Two calls, the second
with --append, hold all: `--arms ours v2:1 v1:1 ours`, then `--arms ours v2:0 v1:0 ours`.

An arm is `ours`, `v1` or `v2`; vLLM's takes `:0` or `:1` for VLLM_ENABLE_V1_MULTIPROCESSING (without: both, one after
the other). Results are saved after each arm, those of an arm that has to be stopped too; `--append` goes on from a file
that is there. An arm that would not fit into --seconds is left out, and the report says so; mrv2's have their time
reserved.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RUN = """
import importlib.util, sys
path, batches = sys.argv[1], sys.argv[2]
spec = importlib.util.spec_from_file_location("bench", path)
bench = importlib.util.module_from_spec(spec)
spec.loader.exec_module(bench)
if batches:
    bench.DECODE = [case for case in bench.DECODE if str(case[0]) in batches.split(",")]
sys.argv = [path, *sys.argv[3:]]
bench.main()
"""
"""Runs BENCH.py with some of its cases."""

ROW = re.compile(r"^[12] (\{.*\})$")
"""How BENCH.py prints a case that is done."""

LEAST_SECONDS = 30
"""An arm with less than that left isn't begun."""

Arm = dict[str, Any]


# -- arms --------------------------------------------------------------------------------------------------


def arms_of(names: Sequence[str]) -> list[tuple[str, str | None]]:
    """Arms with the setting of vLLM's multiprocessing."""
    arms: list[tuple[str, str | None]] = []
    for name in names:
        kind, _, setting = name.partition(":")
        if kind not in ("ours", "v1", "v2") or setting not in ("", "0", "1") or (kind == "ours" and setting):
            raise SystemExit(f"--arms {name}: an arm is ours, v1, v2, or one of vLLM's with :0 or :1")
        arms += [(kind, None)] if kind == "ours" else [(kind, s) for s in ([setting] if setting else ["1", "0"])]
    return arms


def arm_environ(kind: str, setting: str | None, args: argparse.Namespace) -> dict[str, str]:
    paths = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    environ = dict(os.environ)
    if kind == "ours":
        paths.insert(0, str(Path(__file__).parent / "as_vllm"))
    else:
        # Our own plugin would be found and asked in every process of vLLM's: nothing of ours takes part there.
        environ |= {"VLLM_PLUGINS": "", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
        environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = setting or "1"
        if args.site:
            paths = [str(args.site.resolve())]
    return environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}


def card() -> str:
    """Name and driver, without a CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "no GPU"


def run_arm(kind: str, setting: str | None, args: argparse.Namespace, seconds: float) -> Arm:
    """Measure one arm, for so many seconds at most."""
    name = kind if setting is None else f"{kind}:{setting}"
    arm: Arm = {"arm": name, "repeat": args.repeat}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "out.json", Path(folder) / "log"
        batches = ",".join(map(str, args.batches))
        command = [args.vllm_python if setting else sys.executable, "-P", "-c", RUN, str(args.bench.resolve()), batches]
        command += ["1" if kind == "v1" else "2", str(out), "--cases", args.cases, "--repeat", str(args.repeat)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=arm_environ(kind, setting, args),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=seconds)
            stop_group(process)
        text = log.read_text(errors="replace")
        arm["rows"] = [ast.literal_eval(m[1]) for line in text.splitlines() if (m := ROW.match(line))]
        with contextlib.suppress(OSError, ValueError):
            done = json.loads(out.read_text())
            arm |= {key: done[key] for key in ("startup_s", "vllm", "torch", "gpu") if key in done}
    if process.returncode != 0:
        arm["failed"] = f"exit code {process.returncode} after {time.perf_counter() - start:.0f} s"
        arm["log"] = text[-3000:]
    return arm | {"seconds": round(time.perf_counter() - start, 1)}


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """End the arm, and what it has started: workers would keep the GPU's memory."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 10.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience)
            if process.returncode is not None and sign == signal.SIGTERM:
                time.sleep(0.5)


# -- report ------------------------------------------------------------------------------------------------


def case_name(row: dict[str, Any]) -> str:
    if row["case"] == "yardstick":
        return "256 requests, 100-1024 in and out"
    return f"batch {row['batch']}, {row['isl']} in, {row['osl']} out, temperature {row['temperature']:g}"


def rates(arms: Sequence[Arm]) -> dict[str, dict[str, float]]:
    """Output tokens per second by case and arm: the median over all runs of arms of one name."""
    seconds: dict[tuple[str, str], list[float]] = {}
    tokens: dict[str, float] = {}
    for arm in arms:
        for row in arm["rows"]:
            case = case_name(row)
            seconds.setdefault((case, arm["arm"]), []).extend(row["seconds"])
            tokens.setdefault(case, row["tok_s"] * statistics.median(row["seconds"]))
    table: dict[str, dict[str, float]] = {}
    for (case, name), times in seconds.items():
        table.setdefault(case, {})[name] = tokens[case] / statistics.median(times)
    return table


def summary(arms: Sequence[Arm]) -> list[dict[str, Any]]:
    rows = []
    for case, rate in rates(arms).items():
        theirs = {name: r for name, r in rate.items() if name != "ours"}
        best = max(theirs, key=lambda name: theirs[name], default=None)
        row: dict[str, Any] = {"case": case, "tokens_per_second": {name: round(r) for name, r in rate.items()}}
        if best is not None and "ours" in rate:
            row |= {"best_of_vllm": best, "ours_over_it": round(rate["ours"] / theirs[best], 3)}
        rows.append(row)
    return rows


def print_table(report: dict[str, Any]) -> None:
    names = list(dict.fromkeys(arm["arm"] for arm in report["arms"]))
    print("| output tokens/s | " + " | ".join(names) + " | ours over the better of vLLM's |")
    print("|---" * (len(names) + 2) + "|")
    for row in report["summary"]:
        cells = [f"{row['tokens_per_second'][n]:,}" if n in row["tokens_per_second"] else "-" for n in names]
        ratio = f"{row['ours_over_it']:.2f} ({row['best_of_vllm']})" if "ours_over_it" in row else "-"
        print(f"| {row['case']} | " + " | ".join(cells) + f" | {ratio} |")
    starts = [f"{arm['arm']} {arm['startup_s']:.0f} s" for arm in report["arms"] if "startup_s" in arm]
    print("\nstart to ready: " + (", ".join(starts) or "-"))
    for arm in report["arms"]:
        if "failed" in arm:
            print(f"{arm['arm']}: {arm['failed']}, {len(arm['rows'])} cases done")
    for name in report["left_out"]:
        print(f"{name}: left out, there was no time for it")


def save(path: Path, report: dict[str, Any]) -> None:
    report["summary"] = summary(report["arms"])
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--site", type=Path, help="vLLM's PYTHONPATH")
    parser.add_argument("--vllm-python", default=sys.executable)
    parser.add_argument("--arms", nargs="+", default=["ours", "v2", "v1", "ours"])
    parser.add_argument("--cases", default="decode,yardstick")
    parser.add_argument("--batches", type=int, nargs="*", default=[], help="of the decode cases; default: all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=540, help="for everything")
    parser.add_argument("--arm-seconds", type=float, default=200, help="for one arm, its start included")
    parser.add_argument("--append", action="store_true")
    args = parser.parse_args()
    arms, end = arms_of(args.arms), time.monotonic() + args.seconds
    report: dict[str, Any] = {
        "benchmark": "compare_vllm",
        "command": shlex.join(["python", *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": card(),
        "arms": [],
        "left_out": [],
    }
    if args.append and args.json.exists():
        report = json.loads(args.json.read_text())
    for i, (kind, setting) in enumerate(arms):
        name = kind if setting is None else f"{kind}:{setting}"
        took = {arm["arm"] == "ours": arm["seconds"] for arm in report["arms"]}  # the last of each side
        reserved = sum(kind == "ours" for kind, _ in arms[i + 1 :]) * took.get(True, LEAST_SECONDS)
        left = end - time.monotonic() - reserved
        if left < max(LEAST_SECONDS, took.get(kind == "ours", 0)):
            report["left_out"].append(name)
            save(args.json, report)
            continue
        print(f"{name}: {left:.0f} s left", file=sys.stderr, flush=True)
        arm = run_arm(kind, setting, args, min(left - 2, args.arm_seconds))
        report["arms"].append(arm)
        save(args.json, report)
        for row in arm["rows"]:
            print(f"{name}: {case_name(row)}: {row['tok_s']:,} tokens/s", file=sys.stderr, flush=True)
    print_table(report)


if __name__ == "__main__":
    main()
