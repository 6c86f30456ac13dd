"""A real vLLM in this process, on the CPU, its kernels interpreted. Skipped where it isn't installed."""

import contextlib
import gc
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import transformers

from mrv2.testing.checkpoints import edit_config, make_checkpoint, read_tensors

ROOT = Path(__file__).parents[2]
SAMPLES = Path(__file__).parent / "samples"

CACHE = "MRV2_TEST_VLLM_CACHE"
HAVE_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAVE_VLLM else ["test_*.py"]

if HAVE_VLLM:
    # Read when vLLM is imported, or when it loads its plug-ins, which it does once per process.
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # One for all processes of a run.
        "VLLM_CACHE_ROOT": os.environ[CACHE] if CACHE in os.environ else tempfile.mkdtemp(prefix="mrv2-vllm-"),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "MRV2_LOCAL_ADAPTERS": os.pathsep.join(
            map(str, [ROOT / "examples" / "recurrent", *sorted(SAMPLES.glob("*.py"))])
        ),
    }
    os.environ[CACHE] = os.environ["VLLM_CACHE_ROOT"]
    sys.path.insert(0, str(ROOT / "examples"))


def pytest_report_header(config):
    return None if HAVE_VLLM else "tests/bridge: skipped, vLLM isn't installed (make test-vllm)"


@pytest.fixture(scope="session")
def inspected_here():
    """vLLM asks a process, which imports everything anew, about each class that it hasn't seen. Here it asks this one;
    test_registration.py and servers ask as ever. Gives how vLLM asks.
    """
    from vllm.model_executor.models import registry

    with pytest.MonkeyPatch.context() as patch:
        apart = registry._run_in_subprocess
        patch.setattr(registry, "_run_in_subprocess", lambda ask: ask())
        yield apart


@pytest.fixture(scope="session")
def engine(inspected_here):
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
            if not gc.get_freeze_count():
                gc.freeze()  # half of an engine's start and end: they collect garbage among all that was ever imported

    yield make
    gc.unfreeze()


@pytest.fixture
def platform_sets(monkeypatch):
    """platform_sets(change): what vLLM's CPU platform decides about a config, corrected by `change(config)`."""
    from vllm.platforms import current_platform

    def make(change):
        decide = current_platform.check_and_update_config

        def decided(config):
            decide(config)
            change(config)

        monkeypatch.setattr(type(current_platform), "check_and_update_config", staticmethod(decided))

    return make


@pytest.fixture
def processes(monkeypatch, platform_sets):
    """processes(start): from now on an engine is a process of its own, and so are its workers. "spawn" is vLLM's choice
    on a CPU. With "fork", only in a test marked `alone`: where engines have run before, forked ones hang now and then.
    """

    def make(start):
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # of a function that looks at the workers' models
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", start)
        platform_sets(lambda config: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD=start))

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
            assert len(tokens) == n
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


@pytest.fixture(scope="session")
def drafts():
    """drafts(llm): proposed and accepted tokens, and how many drafts were accepted up to each position."""

    def count(llm):
        found = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics() if "spec_decode" in m.name}
        per_position = found["num_accepted_tokens_per_pos"].values
        return found["num_draft_tokens"].value, found["num_accepted_tokens"].value, per_position

    return count


# -- what models should compute ----------------------------------------------------------------------------


class Oracle:
    """A checkpoint and what it computes, by a reference that shares no code with either host.

    Args:
        folder: the checkpoint.
        architecture: what vLLM should run it as.
        logprobs: (token ids, options of the request) to [len(ids), vocab].
    """

    def __init__(self, folder, architecture, logprobs):
        self.folder = folder
        self.architecture = architecture
        self.settings = {"hf_overrides": {"architectures": [architecture]}}
        self.logprobs = logprobs

    def check(self, prompts, results, options=None):
        """Tokens are the reference's greedy ones, and log-probabilities within 1e-4 at every token."""
        for prompt, (tokens, logprobs, _), option in zip(prompts, results, options or [{}] * len(prompts), strict=True):
            want = self.logprobs([*prompt, *tokens], option)[len(prompt) - 1 : -1]
            assert tokens == want.argmax(-1).tolist()
            # A decaying state hides a wrong start from the tokens, not from the log-probabilities.
            assert max(abs(float(w.max()) - got) for w, got in zip(want, logprobs, strict=True)) < 1e-4


SIZES = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """family("LlamaConfig", **changes): an oracle of a tiny model of transformers', under our name in vLLM."""
    made = {}

    def make(config_class, **changes):
        key = json.dumps([config_class, changes], sort_keys=True)
        if key not in made:
            config = getattr(transformers, config_class)(**(SIZES | changes))
            folder = make_checkpoint(tmp_path_factory.mktemp(config_class) / "model", config, seed=4)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            ).eval()

            @torch.inference_mode()
            def logprobs(ids, options):
                return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

            architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
            made[key] = Oracle(folder, f"Mrv2{architecture}", logprobs)
        return made[key]

    return make


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
FAMILIES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN}),
    "qwen2-mixed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"attention_bias": True}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
}


@pytest.fixture(scope="session")
def oracle(family):
    """oracle("qwen3"): of one of FAMILIES."""

    def make(name):
        config_class, changes = FAMILIES[name]
        return family(config_class, **changes)

    return make


@pytest.fixture(scope="session")
def tidal(tmp_path_factory):
    """tidal(**changes): an oracle of the sample with mixers of its own, whose reference is beside it."""
    from recurrent import reference
    from recurrent.config import TidalConfig

    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}

    def make(**changes):
        folder = tmp_path_factory.mktemp("tidal") / "model"
        config = TidalConfig(**(sizes | {"max_position_embeddings": 256} | changes))
        model = reference.Reference(reference.make_checkpoint(folder, config, seed=3))
        return Oracle(folder, "TidalForCausalLM", lambda ids, options: model(tuple(ids)).log_softmax(-1))

    return make


@pytest.fixture(scope="session")
def scaled(tmp_path_factory):
    """The sample with an extra input: embeddings times (1 + the request's scale * position)."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("scaled") / "model",
        transformers.LlamaConfig(**(SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1})),
        seed=2,
    )
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    table = read_tensors(folder)["model.embed_tokens.weight"]
    edit_config(folder, architectures=["ScaledForCausalLM"])

    @torch.inference_mode()
    def logprobs(ids, options):
        x = table[ids] * (1 + options.get("scale", 0.0) * torch.arange(len(ids)))[:, None]
        return model(inputs_embeds=x[None], use_cache=False).logits[0].log_softmax(-1)

    return Oracle(folder, "ScaledForCausalLM", logprobs)


@pytest.fixture(scope="session")
def text_folder_of(text_model, tmp_path_factory):
    """text_folder_of("Qwen3Config"): the tokenizer of `text_model`, and a model of that type whose heads are as wide as
    vLLM's attention for CPUs wants them.
    """
    made = {}

    def make(config_class):
        if config_class not in made:
            ids = {k: v for k, v in transformers.AutoConfig.from_pretrained(text_model).to_dict().items() if "_id" in k}
            sizes = SIZES | {"num_attention_heads": 2, "num_key_value_heads": 1} | ids
            vocab = transformers.AutoConfig.from_pretrained(text_model).vocab_size
            config = getattr(transformers, config_class)(**sizes | {"vocab_size": vocab})
            folder = made[config_class] = make_checkpoint(tmp_path_factory.mktemp("text") / "model", config, seed=6)
            for file in (*text_model.glob("token*"), *text_model.glob("*.jinja")):
                shutil.copy(file, folder)
        return made[config_class]

    return make


@pytest.fixture(scope="session")
def text_folder(text_folder_of):
    """The usual one of them."""
    return text_folder_of("LlamaConfig")


@pytest.fixture(scope="session")
def ragged():
    """ragged(lens): prompts of these lengths."""

    def make(lens, seed=0):
        rng = random.Random(seed)
        return [[rng.randrange(SIZES["vocab_size"]) for _ in range(n)] for n in lens]

    return make
