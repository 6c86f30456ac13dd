"""A real vLLM in this process, on the CPU, its kernels interpreted. Skipped where it isn't installed."""

import contextlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "samples"

HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]

if HAVE_VLLM:
    # Read when vLLM is imported, or when it loads its plug-ins, which it does once per process.
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": tempfile.mkdtemp(prefix="mrv2-vllm-"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "MRV2_LOCAL_ADAPTERS": os.pathsep.join(
            map(str, [ROOT / "examples" / "recurrent", *sorted(SAMPLES.glob("*.py"))])
        ),
    }
    sys.path.insert(0, str(ROOT / "examples"))


def pytest_report_header(config):
    return None if HAVE_VLLM else "tests/bridge: skipped, vLLM isn't installed (make test-vllm)"


@pytest.fixture(scope="session")
def engine():
    """engine(folder, **settings): a context manager that gives an `LLM` of vLLM's."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "block_size": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
    }

    @contextlib.contextmanager
    def make(folder, **settings):
        llm = None
        try:
            llm = LLM(model=str(folder), **(defaults | settings))
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            cleanup_dist_env_and_memory()

    return make


@pytest.fixture(scope="session")
def runner_of():
    """runner_of(llm): vLLM's model runner."""
    return lambda llm: llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


@pytest.fixture(scope="session")
def generate():
    """generate(llm, prompts, n, options): per prompt its tokens, their log-probabilities, and cached tokens."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    def run(llm, prompts, n=12, options=None):
        options = options or [{}] * len(prompts)
        params = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0, extra_args=o)
            for o in options
        ]
        outs = llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params, use_tqdm=False)
        results = []
        for out in outs:
            tokens = list(out.outputs[0].token_ids)
            logprobs = [step[t].logprob for step, t in zip(out.outputs[0].logprobs, tokens, strict=True)]
            results.append((tokens, logprobs, out.num_cached_tokens))
        return results

    return run


@pytest.fixture
def native(monkeypatch):
    """native(folder, **settings): our own `LLM`, which runs torch twins and not the interpreter."""
    from mrv2 import LLM

    def make(folder, **settings):
        monkeypatch.delenv("TRITON_INTERPRET")
        return LLM(str(folder), **settings)

    return make


@pytest.fixture(scope="session")
def preemptions():
    """preemptions(llm): how many there were."""

    def count(llm):
        return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")

    return count
