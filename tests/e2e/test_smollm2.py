"""Real weights: SmolLM2-135M-Instruct in float32, token by token against transformers."""

import json
import subprocess
import sys

import pytest
import torch

from mrv2 import LLM, SamplingParams

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(900)]

PROMPTS = [
    "The history of computing began",
    "def fibonacci(n):\n",
    "In the year 2050, the city of Paris",
    "Q: What is the boiling point of water?\nA:",
    "Il était une fois",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with LLM("smollm2", dtype="float32", device="cpu", max_model_len=512, max_num_seqs=8) as llm:
        yield llm
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def theirs(llm):
    """transformers: a greedy continuation with its own cache, and the likeliest tokens after each of a text's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = llm.model.config.path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)

    def generate(ids, n):
        with torch.inference_mode():
            out = model.generate(torch.tensor([ids]), max_new_tokens=n, do_sample=False)
        return out[0, len(ids) :].tolist()

    def likeliest(ids):
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0].argmax(-1).tolist()

    return tokenizer, generate, likeliest


def test_greedy_tokens_equal_transformers(llm, theirs):
    tokenizer, _, likeliest = theirs
    params = SamplingParams(temperature=0, max_tokens=64)
    ours = llm.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, ours, strict=True):
        ids = tokenizer.encode(prompt)
        assert list(result.prompt_token_ids) == ids
        said = list(result.outputs[0].token_ids)
        # Each token is the likeliest after those before it: one forward, where a greedy continuation takes 64.
        assert said == likeliest(ids + said)[len(ids) - 1 : -1]
        assert len(said) == 64 or result.outputs[0].finish_reason == "stop"


def test_the_demo_prints_what_it_promises(llm):
    params = ("--chat", "--temperature", "0", "--max-tokens", "24", "--json")
    command = [sys.executable, "-m", "mrv2", "generate", "smollm2", QUESTION[0]["content"], *params]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["outputs"][0]["text"] == "The capital of France is Paris."
    assert result["outputs"][0]["finish_reason"] == "stop"
    assert result["prompt_token_ids"] == llm.chat_prompt(QUESTION)


def test_chat_template_equals_transformers(llm, theirs):
    tokenizer, generate, _ = theirs
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    assert llm.chat_prompt(QUESTION) == ids
    result = llm.generate([ids], SamplingParams(temperature=0, max_tokens=24))[0]
    assert list(result.outputs[0].token_ids) == generate(ids, 24)
    assert result.outputs[0].text == "The capital of France is Paris."
