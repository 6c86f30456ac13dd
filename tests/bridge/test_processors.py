"""An adapter's logits processors in vLLM; and processors that a user gives to vLLM, with an adapter's model."""

import shutil
import sys

import pytest

from mrv2.errors import UnsupportedError
from mrv2.testing.checkpoints import edit_config

OPTIONS = [{}, {"fresh": True}, {"favour": 7}, {"fresh": True, "favour": 9}, {}, {"fresh": True}]
LENS = (3, 30, 12, 50, 21, 21)


@pytest.fixture(scope="module")
def steered(family, tmp_path_factory):
    one = family("LlamaConfig", num_attention_heads=2, num_key_value_heads=1)
    folder = tmp_path_factory.mktemp("steered") / "model"
    shutil.copytree(one.folder, folder)
    edit_config(folder, architectures=["SteeredForCausalLM"])
    return folder, one


def expected(one, prompt, options, n):
    """Tokens, and their log-probabilities before they are steered, by a loop that knows no host."""
    ids, logprobs = list(prompt), []
    for _ in range(n):
        plain = one.logprobs(ids, {})[-1]
        scores = plain.clone()
        if options.get("fresh"):
            scores[ids] = float("-inf")
        if "favour" in options and len(ids) % 2 == 0:
            scores[options["favour"]] += 100
        ids.append(int(scores.argmax()))
        logprobs.append(float(plain[ids[-1]]))
    return ids[len(prompt) :], logprobs


def check(one, prompts, got, n):
    for prompt, options, (tokens, logprobs) in zip(prompts, OPTIONS, got, strict=True):
        want = expected(one, prompt, options, n)
        assert list(tokens) == want[0]
        assert logprobs == pytest.approx(want[1], abs=1e-4)


def test_in_vllm_with_chunks_and_preemptions(steered, engine, generate, preemptions, ragged):
    from vllm.exceptions import VLLMValidationError

    folder, one = steered
    prompts = ragged(LENS)
    with engine(folder, max_num_batched_tokens=24, num_gpu_blocks_override=9) as llm:
        with pytest.raises(VLLMValidationError, match="favour: Input should be a valid integer"):
            generate(llm, [[1]], 4, [{"favour": "much"}])
        check(one, prompts, [got[:2] for got in generate(llm, prompts, 40, OPTIONS)], 40)
        assert preemptions(llm) > 0


def test_drafts_are_refused(steered, engine):
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    refused = pytest.raises(UnsupportedError, match="logits processors of an adapter, and drafts")
    with refused, engine(steered[0], speculative_config=ngram):
        pass


def test_a_users_own_processor(family, engine, generate, ragged, tmp_path, monkeypatch):
    """vLLM's `--logits-processors` works with adapters' models as with its own."""
    (tmp_path / "users_own.py").write_text(
        "from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor\n"
        "class Never(LogitsProcessor):\n"
        "    def apply(self, logits, ctx):\n"
        "        logits[:, :30] = float('-inf')\n"
        "        return logits\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    one = family("LlamaConfig", tie_word_embeddings=True)
    prompts = ragged((3, 9))
    with engine(one.folder, **one.settings, logits_processors=["users_own:Never"]) as llm:
        for prompt, (tokens, _, _) in zip(prompts, generate(llm, prompts, 8), strict=True):
            ids = list(prompt)
            for _ in range(8):
                ids.append(30 + int(one.logprobs(ids, {})[-1][30:].argmax()))
            assert tokens == ids[len(prompt) :]
    sys.modules.pop("users_own")
