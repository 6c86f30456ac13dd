"""What vLLM itself does with logits and text: with an adapter's model all of it is what vLLM's own class gives."""

import json
import re

import pytest

SCHEMA = {
    "type": "object",
    "properties": {"sat": {"type": "boolean"}, "who": {"enum": ["cat", "rat", "grüße"]}},
    "required": ["sat", "who"],
    "additionalProperties": False,
}
REGEX = r"(the|on) [a-d]{3}-[0-9]{2}"
CHOICE = ["the cat sat", "the rat", "猫"]
DRAWN = {"temperature": 0.9, "max_tokens": 8, "ignore_eos": True}
REQUESTS = {
    "greedy": {"temperature": 0, "max_tokens": 8, "logprobs": 3, "prompt_logprobs": 2},
    "seed": DRAWN | {"seed": 5},
    "filters": DRAWN | {"seed": 6, "top_k": 20, "top_p": 0.8},
    "min_p": DRAWN | {"seed": 7, "min_p": 0.05},
    "n": DRAWN | {"seed": 8, "n": 3},
    "penalties": DRAWN | {"seed": 9, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "bias": {"temperature": 0, "max_tokens": 8, "logit_bias": {70: 100.0}, "ignore_eos": True},
    "allowed": DRAWN | {"seed": 10, "allowed_token_ids": list(range(60, 90))},
    "bad_words": DRAWN | {"seed": 11, "bad_words": ["the"]},
    "min_tokens": {"temperature": 0, "max_tokens": 8, "min_tokens": 5, "logit_bias": {0: 100.0}},
}
GRAMMARS = {"json": {"json": SCHEMA}, "regex": {"regex": REGEX}, "choice": {"choice": CHOICE}}


pytestmark = pytest.mark.slow


def answers(llm):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = {name: SamplingParams(**options) for name, options in REQUESTS.items()}
    for name, grammar in GRAMMARS.items():
        asked[name] = SamplingParams(
            temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(**grammar)
        )
        drawn = {"temperature": 2.0, "seed": 12, "max_tokens": 48}
        asked[f"{name} drawn"] = SamplingParams(structured_outputs=StructuredOutputsParams(**grammar), **drawn)
    results = llm.generate(["the cat sat on"] * len(asked), list(asked.values()), use_tqdm=False)
    found = dict(zip(asked, results, strict=True))
    # A string that stops has to come up: the end of what is said without it.
    tail = found["seed"].outputs[0].text[4:8]
    (stopped,) = llm.generate(["the cat sat on"], SamplingParams(**DRAWN, seed=5, stop=[tail]), use_tqdm=False)
    return found | {"stop": stopped}


def shown(result):
    return [(list(o.token_ids), o.text, o.finish_reason, o.stop_reason) for o in result.outputs]


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_parameters_and_grammars(family, text_folder_of, engine):
    pytest.importorskip("lmformatenforcer", reason="vLLM imports it when it checks a structured output")
    settings = {
        "skip_tokenizer_init": False,
        "max_model_len": 128,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    folder = text_folder_of(f"{family}Config")
    with engine(folder, **settings) as llm:
        theirs = answers(llm)
    with engine(folder, hf_overrides={"architectures": [f"Mrv2{family}ForCausalLM"]}, **settings) as llm:
        ours = answers(llm)
    for name, want in theirs.items():
        assert shown(ours[name]) == shown(want), name
    for mine, want in zip(_logprobs(ours["greedy"]), _logprobs(theirs["greedy"]), strict=True):
        assert mine.keys() == want.keys()
        assert all(abs(mine[t] - want[t]) < 1e-4 for t in want)
    # That equal means right: a few things that can be seen from the text alone.
    first = {name: result.outputs[0] for name, result in ours.items()}
    for kind in ("", " drawn"):
        said = json.loads(first[f"json{kind}"].text)
        assert said.keys() == {"sat", "who"}
        assert said["who"] in SCHEMA["properties"]["who"]["enum"]
        assert re.fullmatch(REGEX, first[f"regex{kind}"].text)
        assert first[f"choice{kind}"].text in CHOICE
    assert len({tuple(o.token_ids) for o in ours["n"].outputs}) == 3
    assert set(first["bias"].token_ids) == {70}
    assert set(first["allowed"].token_ids) <= set(range(60, 90))
    assert "the" not in first["bad_words"].text
    assert (len(first["min_tokens"].token_ids), first["min_tokens"].finish_reason) == (6, "stop")
    assert first["stop"].finish_reason == "stop"
    assert first["seed"].text.startswith(first["stop"].text)


def _logprobs(result):
    """Per position, prompt and answer, log-probabilities by token."""
    steps = [*result.prompt_logprobs[1:], *result.outputs[0].logprobs]
    return [{token: one.logprob for token, one in step.items()} for step in steps]
