"""The same adapter and checkpoint in vLLM, natively, and in transformers: equal tokens, close log-probabilities."""

import json
import random

import pytest
import transformers

from mrv2 import Registry, SamplingParams
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.naive import NaiveGreedy, transformers_logits

TOLERANCE = 1e-4
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
CONFIGS = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-rope": ("LlamaConfig", {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("MistralConfig", {"sliding_window": 20}),
    "qwen2": ("Qwen2Config", {"rope_parameters": YARN}),
    "qwen2-mixed": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"attention_bias": True}),
    "qwen3-moe": ("Qwen3MoeConfig", MOE),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
}


class Reference:
    """transformers' greedy tokens, and log-probabilities of given ones."""

    def __init__(self, folder):
        self.folder = folder
        self.logits = transformers_logits(folder)
        self.greedy = NaiveGreedy(self.logits)
        self.architecture = json.loads((folder / "config.json").read_text())["architectures"][0]

    def check(self, prompts, results, n=12):
        for prompt, (tokens, logprobs, _) in zip(prompts, results, strict=True):
            assert tokens == self.greedy(prompt, n)
            for i in (0, n // 2, n - 1):
                want = self.logits([*prompt, *tokens[:i]]).log_softmax(-1)[tokens[i]]
                assert abs(float(want) - logprobs[i]) < TOLERANCE


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            cls, changes = CONFIGS[name]
            config = getattr(transformers, cls)(**(SIZES | changes))
            served = {a for e in Registry.discover().entries for a in e.architectures}
            if config.__class__.__name__.replace("Config", "ForCausalLM") not in served:
                pytest.skip(f"no adapter here has {cls}")
            folder = make_checkpoint(tmp_path_factory.mktemp(name) / "model", config, seed=4)
            made[name] = Reference(folder)
        return made[name]

    return make


def ragged(lens, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(61) for _ in range(n)] for n in lens]


RAGGED = ragged((1, 3, 100, 17, 33, 70, 5, 12))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_ragged_batch_and_prefix_hits(name, reference, engine, generate, runner_of, native):
    one = reference(name)
    with engine(one.folder, hf_overrides={"architectures": [f"Mrv2{one.architecture}"]}) as llm:
        model = runner_of(llm).model
        assert type(model).__name__ == f"Mrv2{one.architecture}"
        assert type(model).__mro__[2].__module__.startswith("mrv2_adapter_")
        cold = generate(llm, RAGGED)
        one.check(RAGGED, cold)
        assert [cached for _, _, cached in cold] == [0] * len(RAGGED)
        warm = generate(llm, RAGGED)
        one.check(RAGGED, warm)
        assert [cached for _, _, cached in warm] == [(len(p) - 1) // 32 * 32 for p in RAGGED]
    with native(one.folder) as llm:
        out = llm.generate(RAGGED, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        assert [list(r.outputs[0].token_ids) for r in out] == [tokens for tokens, _, _ in cold]


@pytest.mark.parametrize("name", ["llama", "qwen2-mixed"])
def test_chunks_and_preemptions(name, reference, engine, generate, preemptions):
    one = reference(name)
    prompts = ragged((60, 61, 90, 62, 40, 95), seed=1)
    with engine(
        one.folder,
        hf_overrides={"architectures": [f"Mrv2{one.architecture}"]},
        max_num_batched_tokens=16,
        num_gpu_blocks_override=15,
        enable_prefix_caching=False,
    ) as llm:
        one.check(prompts, generate(llm, prompts, 40), 40)
        assert preemptions(llm) > 0


def test_a_compiled_model(reference, engine, generate):
    one = reference("llama")
    with engine(one.folder, hf_overrides={"architectures": ["Mrv2LlamaForCausalLM"]}, enforce_eager=False) as llm:
        one.check(RAGGED, generate(llm, RAGGED))
