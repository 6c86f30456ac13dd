"""An adapter's own tokenizer in vLLM: text and chats in, text out, as natively."""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrv2 import SamplingParams
from mrv2.errors import TokenizerError
from mrv2.testing.checkpoints import edit_config

SAMPLE = str(Path(__file__).parent / "samples" / "wordy.py")
N = 12
CHAT = [{"role": "user", "content": "w3 w17 w4"}]


def greedy(one, ids, n=N):
    ids = list(ids)
    start = len(ids)
    for _ in range(n):
        ids.append(int(one.logprobs(ids, {})[-1].argmax()))
    return ids[start:]


@pytest.fixture
def wordy(family, tmp_path):
    """The checkpoint, what follows its prompts, and its end tokens: the second of them comes up in the first answer."""
    one = family("LlamaConfig", num_attention_heads=2, num_key_value_heads=1)
    for file in one.folder.iterdir():
        os.symlink(file, tmp_path / file.name)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text((one.folder / "config.json").read_text())
    edit_config(tmp_path, architectures=["WordyForCausalLM"])
    words = [f"w{i}" for i in range(60)] + ["turn"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    answers = {prompt: greedy(one, map(words.index, prompt.split())) for prompt in ("w1 w2 w30", "turn w3 w17 w4 turn")}
    first = answers["w1 w2 w30"]
    never = next(i for i in range(60) if not any(i in answer for answer in answers.values()))
    ends = [never, next(i for i in first[3:] if i not in answers["turn w3 w17 w4 turn"])]
    (tmp_path / "ends.json").write_text(json.dumps(ends))
    return tmp_path, answers, ends


def shown(ids, ends=()):
    return "".join(f"w{i} " if i < 60 else "turn " for i in ids if i not in ends)


def test_text_and_chats(wordy, engine, native):
    from vllm import SamplingParams as Params

    folder, answers, ends = wordy
    first, second = answers.values()
    stopped = first[: first.index(ends[1])]
    settings = {"temperature": 0, "max_tokens": N}
    with engine(folder, skip_tokenizer_init=False) as llm:

        def said(**changes):
            return llm.generate("w1 w2 w30", Params(**settings | changes), use_tqdm=False)[0].outputs[0]

        out = said()
        assert (list(out.token_ids), out.finish_reason, out.stop_reason) == ([*stopped, ends[1]], "stop", ends[1])
        assert out.text == shown(stopped)
        out = said(ignore_eos=True)
        assert (list(out.token_ids), out.finish_reason) == (first, "length")
        assert out.text == shown(first, ends)
        assert said(ignore_eos=True, skip_special_tokens=False).text == shown(first)
        out = said(stop=[shown(first[1:2])])
        assert (out.text, out.finish_reason) == (shown(first[:1]), "stop")
        out = llm.chat(CHAT, Params(**settings), use_tqdm=False)[0]
        assert (out.outputs[0].text, list(out.outputs[0].token_ids)) == (shown(second), second)
        _refusals(llm, Params)
        _server(llm, out.prompt_token_ids)
    with native(folder, adapters=[SAMPLE]) as llm:
        assert (
            llm.generate("w1 w2 w30", SamplingParams(**settings))[0].outputs[0].text.strip() == shown(stopped).strip()
        )


def _refusals(llm, params):
    """What needs more than such a tokenizer is the caller's error, and no engine's."""
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import StructuredOutputsParams

    with pytest.raises(VLLMValidationError, match="structured outputs need a tokenizer of transformers'"):
        llm.generate("w1", params(structured_outputs=StructuredOutputsParams(choice=["w1"])), use_tqdm=False)
    with pytest.raises(VLLMValidationError, match="chat template takes no tools"):
        llm.chat(CHAT, tools=[{"type": "function", "function": {"name": "f"}}], use_tqdm=False)
    with pytest.raises((VLLMValidationError, ValueError), match="out of vocabulary"):
        llm.generate({"prompt_token_ids": [61]}, use_tqdm=False)


def _server(llm, prompt):
    """A server renders in its event loop, and tells every template what it has defaults for."""
    from vllm.renderers import ChatParams

    params = ChatParams(chat_template_kwargs={"cohere_format": "cmd4"})
    _, rendered = asyncio.run(llm.llm_engine.renderer.render_messages_async(CHAT, params))
    assert rendered["prompt_token_ids"] == prompt


def source(own, folder="/there"):
    from mrv2.bridge.tokenizer import TokenizerSource

    return type("Source", (TokenizerSource,), {"mrv2_found": {(str(folder), None): own}})


def test_a_tokenizer_of_transformers_kind_is_vllms_own(text_model):
    """An adapter may find its files elsewhere and let transformers do the rest: then vLLM can do all that it can."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(text_model)
    made = source(own).from_pretrained("/there")
    assert isinstance(made, type(own))
    assert len(made) == len(own)


def test_a_tokenizer_without_a_size(tmp_path):
    own = SimpleNamespace(encode=lambda text: [1], decode=lambda ids: "x")
    with pytest.raises(TokenizerError, match=r"(?s)how many token ids.*give the tokenizer vocab_size"):
        source(own, tmp_path).from_pretrained(tmp_path)
    own.vocab_size = 7
    made = source(own, tmp_path).from_pretrained(tmp_path)
    assert (len(made), made.eos_token_id, made.decode([3])) == (7, None, "x")
