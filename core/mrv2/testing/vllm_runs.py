"""Runs inside a real vLLM, each in a process of its own, compared with the reference or with the native host.

The same module is what runs in the child: `python -m mrv2.testing.vllm_runs JOB`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mrv2.errors import Mrv2Error, UnsupportedError
from mrv2.local import is_path
from mrv2.testing.bench import CONTEXT, run_alone
from mrv2.testing.compare import describe, greedy_pair, require_close
from mrv2.testing.results import ConformanceFailure, NotApplicable, NotRun

if TYPE_CHECKING:
    from mrv2.testing.references import Answer
    from mrv2.testing.subject import Case

TIMEOUT_S = 900.0
ERROR_MARK = "mrv2-run-error:"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmRun:
    """One engine and what it generates.

    Args:
        lens: of prompts.
        n: tokens of each.
        repeat: how often the batch is run in the same engine.
        settings: of vLLM's `LLM`.
    """

    lens: tuple[int, ...]
    n: int = 10
    repeat: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)


def check_in_vllm(case: Case, run: VllmRun) -> None:
    """Generate in a child process and compare tokens and log-probabilities.

    Raises:
        NotRun: vLLM isn't installed.
        NotApplicable: nothing is declared for it.
        ConformanceFailure: something differs, or vLLM ended with an error.
    """
    manifest = case.subject.adapter.manifest
    if not any(s.on("vllm") for s in manifest.capabilities.values()):
        raise NotApplicable("nothing is declared for vLLM")
    if importlib.util.find_spec("vllm") is None:
        raise NotRun("vLLM isn't installed")
    ranks = max(int(run.settings.get(f"{kind}_parallel_size", 1)) for kind in ("tensor", "pipeline"))
    if torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise NotRun(f"there are fewer than {ranks} GPUs")
    # Without a reference the native host answers, which has room for that many.
    room = CONTEXT if _answer(case) is None else DEFAULTS["max_model_len"]
    longest = min(room, case.model_config.max_model_len or room) - run.n
    prompts = case.prompts([min(length, longest) for length in run.lens], seed=32)
    options = [dict(case.option(i)) for i in range(len(prompts))]
    local = [a for a in case.subject.adapters if is_path(a)]
    found = run_in_child(str(case.folder), case.model_config.architecture, run, prompts, options, local=local)
    causes = [
        "a kernel or an input relies on something that only the native host does: see the suites above for both",
        "a window, a state or a scale is left to vLLM's own default",
        "the layer's name isn't the attribute path: vLLM finds caches by it",
    ]
    for turn, results in enumerate(found):
        pairs = []
        compared = f"generation inside vLLM (turn {turn + 1}, {dict(run.settings)}) with {_name(case)}"
        for i, (prompt, (tokens, logprobs)) in enumerate(zip(prompts, results, strict=True)):
            want = _want(case, [*prompt, *tokens[:-1]], options[i])[len(prompt) - 1 :]
            pairs.append(greedy_pair(describe(i, prompt, options[i]), want, tokens, logprobs, start=len(prompt)))
        require_close(pairs, compared=compared, tolerance=10 * case.tolerance, causes=causes)


def _answer(case: Case) -> Answer | None:
    """A reference that can be asked about whatever was generated: not a recorded one."""
    return None if case.answer is None or case.answer.recorded else case.answer


def _name(case: Case) -> str:
    answer = _answer(case)
    return "the native host" if answer is None else f"the reference ({answer.name})"


def _want(case: Case, ids: list[int], options: Mapping[str, Any]) -> torch.Tensor:
    answer = _answer(case)
    found = None if answer is None else answer.logprobs(ids, options)
    return run_alone(case.loaded, ids, options, device=case.device) if found is None else found


def run_in_child(
    model: str,
    architecture: str,
    run: VllmRun,
    prompts: list[list[int]],
    options: list[dict[str, Any]],
    *,
    local: Sequence[str] = (),
) -> Any:
    """Tokens and log-probabilities of each prompt in each turn.

    Args:
        model: the checkpoint's folder.
        architecture: as the checkpoint says.
        run: settings.
        prompts: token ids.
        options: `extra_args` of each.
        local: adapters that aren't installed.

    Raises:
        NotRun: it was too slow.
        ConformanceFailure: vLLM ended with an error.
    """
    with tempfile.TemporaryDirectory(prefix="mrv2-vllm-") as folder:
        out = Path(folder) / "out.json"
        job = {
            "model": model,
            "architecture": architecture,
            "prompts": prompts,
            "options": options,
            "n": run.n,
            "repeat": run.repeat,
            "settings": dict(run.settings),
            "out": str(out),
        }
        env = os.environ | _environment(_vllm_cache(), local)
        (Path(folder) / "job.json").write_text(json.dumps(job))
        log = Path(folder) / "log"
        code = _run_child(Path(folder) / "job.json", log, env)
        if code is None:
            raise NotRun(f"vLLM gave no answer within {TIMEOUT_S:g} s")
        if not out.exists():
            said = f"it ended with exit code {code}: {_cause(log.read_text(errors='replace'))}"
            raise ConformanceFailure(
                f"a run inside vLLM with settings {dict(run.settings)}",
                said,
                ["see the message; `mrv2 doctor NAME --vllm` looks at the adapter alone"],
                cause=f"inside vLLM {said}",
            )
        return json.loads(out.read_text())


def _run_child(job: Path, log: Path, env: Mapping[str, str]) -> int | None:
    """Its exit code; None: it was too slow. Whatever it started goes with it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mrv2.testing.vllm_runs", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=env,
            start_new_session=True,
        )
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cause(said: str) -> str:
    """The line of vLLM's output that most likely says what went wrong: ours, else the last error before its summary."""
    lines = [line.strip() for line in said.splitlines() if line.strip()] or ["nothing was said"]
    errors = [line for line in lines if "Error: " in line and "Engine core init" not in line]
    ours = [line for line in lines if "MRV2-" in line]
    return (ours or errors or lines)[-1].partition(ERROR_MARK)[2] or (ours or errors or lines)[-1]


@cache
def _vllm_cache() -> str:
    """What vLLM stores for this process's runs, such as what it found out about a class: in a process of its own."""
    folder = tempfile.mkdtemp(prefix="mrv2-vllm-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _environment(cache_root: str, local: Sequence[str]) -> dict[str, str]:
    """What vLLM reads when it is imported. On a CPU its Triton kernels are interpreted."""
    # Configs are pickled on their way to workers, so the package of a local adapter has to be found by its name there.
    folders = [p or os.getcwd() for p in sys.path] + [str(Path(adapter).parent) for adapter in local]
    env = {
        "PYTHONPATH": os.pathsep.join(folders),
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": cache_root,
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    if local:
        env["MRV2_LOCAL_ADAPTERS"] = os.pathsep.join(local)
    if not torch.cuda.is_available():
        env |= {"TRITON_INTERPRET": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return env


# -- in the child ----------------------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}


def _run(job: Mapping[str, Any]) -> list[list[tuple[list[int], list[float]]]]:
    from vllm import LLM, ModelRegistry

    from mrv2.bridge.names import PREFIX

    many = max(job["settings"].get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")) > 1
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if many else "0"
    LLM  # noqa: B018 - importing it has loaded the plug-ins
    ours = job["architecture"]
    model = ModelRegistry.models.get(ours)
    if getattr(model, "module_name", "").partition("_")[0] != "mrv2":
        ours = PREFIX + ours  # vLLM has a class of that name
    settings = {**DEFAULTS, "hf_overrides": {"architectures": [ours]}, **job["settings"]}
    llm = LLM(model=job["model"], **settings)
    try:
        return _generate(llm, job)
    finally:
        llm.llm_engine.engine_core.shutdown()


def _generate(llm: Any, job: Mapping[str, Any]) -> list[list[tuple[list[int], list[float]]]]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = [
        SamplingParams(
            temperature=0, max_tokens=job["n"], ignore_eos=True, detokenize=False, logprobs=0, extra_args=option or None
        )
        for option in job["options"]
    ]
    results = []
    for _ in range(job["repeat"]):
        outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in job["prompts"]], params, use_tqdm=False)
        turn = []
        for out in outs:
            tokens = list(out.outputs[0].token_ids)
            turn.append((tokens, [step[t].logprob for step, t in zip(out.outputs[0].logprobs, tokens, strict=True)]))
        results.append(turn)
    return results


def main() -> None:
    """Run one job and leave without waiting for vLLM's threads."""
    job = json.loads(Path(sys.argv[1]).read_text())
    try:
        Path(job["out"]).write_text(json.dumps(_run(job)))
    except (Mrv2Error, UnsupportedError, ValueError, RuntimeError) as error:
        text = " ".join(str(error).split())
        print(f"{ERROR_MARK}{text[:2000]}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
