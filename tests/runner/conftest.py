"""Tiny random models of every supported architecture, loaded once, and the oracle for each."""

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
from transformers import LlamaConfig, MistralConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from mrv2.frontend.build import LoadedModel, assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.naive import NaiveGreedy

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from recurrent import reference  # noqa: E402
from recurrent.config import TidalConfig  # noqa: E402

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_hidden_layers": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama-tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "mistral-window": MistralConfig(**SMALL, sliding_window=9),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2-mixed": Qwen2Config(
        **{**SMALL, "num_hidden_layers": 3}, use_sliding_window=True, sliding_window=11, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "qwen3-moe": Qwen3MoeConfig(
        **{**SMALL, "num_hidden_layers": 3},
        head_dim=16,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, sliding_window=9),
    "llama-yarn": LlamaConfig(
        **{**SMALL, "max_position_embeddings": 32},
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "hybrid": TidalConfig(),  # recurrent states, a cache of the adapter's own, and attention
}


@dataclass
class Tiny:
    """One tiny model: as the runner loads it, and as the oracle does."""

    loaded: LoadedModel
    oracle: NaiveGreedy
    path: str
    device: str = "cpu"
    defaults: dict = field(default_factory=lambda: {"max_num_seqs": 8, "max_num_tokens": 64})

    def engine(self, **settings):
        return assemble(self.loaded, EngineConfig(**(self.defaults | {"device": self.device} | settings)))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory, pytestconfig):
    """tiny(name, device) -> Tiny; by default on the device of `--device`. The oracle always runs on the CPU."""

    @cache
    def checkpoint(name):
        folder = tmp_path_factory.mktemp(name) / "model"
        if isinstance(CONFIGS[name], TidalConfig):
            reference.make_checkpoint(folder, CONFIGS[name], seed=3)
            return folder, NaiveGreedy(reference.Reference(folder).next_logits), [str(EXAMPLES / "recurrent")]
        make_checkpoint(folder, CONFIGS[name], seed=3)
        return folder, NaiveGreedy.from_transformers(folder), []

    @cache
    def make(name, device):
        folder, oracle, adapters = checkpoint(name)
        loaded = load(str(folder), EngineConfig(device=device, dtype="float32"), adapters)
        return Tiny(loaded, oracle, str(folder), device)

    return lambda name, device=None: make(name, device or pytestconfig.getoption("--device"))


@pytest.fixture(params=CONFIGS)
def any_tiny(request, tiny):
    """Each architecture in turn."""
    return tiny(request.param)


@pytest.fixture(params=CONFIGS)
def cuda_tiny(request, tiny):
    """Each architecture in turn, on a GPU."""
    return tiny(request.param, "cuda")
