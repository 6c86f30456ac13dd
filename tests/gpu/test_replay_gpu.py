"""A recorded run on a GPU: with graphs and steps in flight it replays equal, and on the CPU what differs is named."""

import pytest
import torch
from transformers import LlamaConfig

from mrv2.frontend.build import assemble, load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.frontend.llm import LLM
from mrv2.sample.params import SamplingParams
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.replay import Recorder, replay, settings_of
from mrv2.testing.runs import read_run

CONFIG = LlamaConfig(
    vocab_size=300,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    max_position_embeddings=256,
    eos_token_id=7,
    bos_token_id=None,
)


def record(folder, run, **settings):
    config = EngineConfig(max_num_seqs=4, max_num_tokens=32, kv_memory=1 << 26, **settings)
    loaded = load(str(folder), config)
    recorder = Recorder(loaded, config, assemble(loaded, config), adapters=())
    prompts = [[(i * k + 3) % 300 for i in range(5 + 9 * k)] for k in range(1, 9)]
    params = [
        SamplingParams(temperature=0.4 * (k % 3), max_tokens=10 + 5 * k, logprobs=k % 2 or None) for k in range(8)
    ]
    with LLM.from_parts(loaded, config, recorder.parts) as llm:
        for k, result in enumerate(llm.generate(prompts, params)):
            recorder.note(k + 1, None, result)
    assert recorder.write(run) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_replays_equal_and_elsewhere_says_what_differs(tmp_path, dtype):
    folder, path = make_checkpoint(tmp_path / "model", CONFIG, seed=3), tmp_path / "run.json"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record(folder, path, device=device, dtype=dtype)
    run = read_run(path)
    config = settings_of(run, {})
    again = replay(run, load(run.model, config), config)
    assert (again.partings, again.differences, again.same_steps) == ([], [], True)
    config = settings_of(run, {"device": "cpu", "dtype": "float32"})
    moved = replay(run, load(run.model, config), config)
    if device == "cuda":
        assert {"device", "graphs", "depth"} <= {d.name for d in moved.differences}
    assert all(parting.number < 8 for parting in moved.partings)
