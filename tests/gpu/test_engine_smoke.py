"""An engine for a few steps, small enough for compute-sanitizer: prompts in chunks, decodes, both together."""

import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig

from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.sample.params import SamplingParams
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.naive import NaiveGreedy

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from recurrent import reference  # noqa: E402
from recurrent.config import TidalConfig  # noqa: E402

pytestmark = pytest.mark.sanitize

LLAMA = LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=128,
    eos_token_id=None,
    bos_token_id=None,
)
PROMPTS = [[i * 7 % 61 for i in range(11)], [5, 3], [i * i % 61 for i in range(23)], [9]]
MAX_TOKENS = 5
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=1, top_k=5, top_p=0.9, min_p=0.01, logprobs=2, max_tokens=MAX_TOKENS),
    GREEDY,
    SamplingParams(temperature=1, seed=2, max_tokens=MAX_TOKENS),
]


@pytest.mark.parametrize("name", ["llama", "recurrent"])
def test_a_few_steps(name, tmp_path, pytestconfig):
    folder = tmp_path / "model"
    if name == "llama":
        make_checkpoint(folder, LLAMA, seed=3)
        oracle, adapters = NaiveGreedy.from_transformers(folder), []
    else:
        reference.make_checkpoint(folder, TidalConfig(), seed=3)
        oracle, adapters = NaiveGreedy(reference.Reference(folder).next_logits), [str(EXAMPLES / "recurrent")]
    config = EngineConfig(
        device=pytestconfig.getoption("--device"),
        dtype="float32",
        max_num_seqs=4,
        max_num_tokens=24,
        max_chunk=7,
        block_size=4,
        num_blocks=200,
        depth=2,
    )
    parts = assemble(load(str(folder), config, adapters), config)
    requests = [parts.intake.request(str(i), p, s) for i, (p, s) in enumerate(zip(PROMPTS, PARAMS, strict=True))]
    waiting = list(requests)
    while waiting or parts.engine.has_work:
        parts.engine.add(waiting[:2])  # the others meet decodes
        del waiting[:2]
        parts.engine.step()
    got = [r.tokens_np[len(r.prompt_np) :].tolist() for r in requests]
    assert [len(tokens) for tokens in got] == [MAX_TOKENS] * len(got)
    for i in (0, 2):
        assert got[i] == oracle(PROMPTS[i], MAX_TOKENS)
