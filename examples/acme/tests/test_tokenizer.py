"""Text to ids and back, and chats in which nobody can speak for somebody else."""

import json
from pathlib import Path

import mrv2
import pytest

from mrv2_adapter_acme.testing import CHECKPOINT
from mrv2_adapter_acme.tokenizer import FILE, AcmeTokenizer, ChatError, VocabularyError

QUESTION = "Do the rockets work?"
ANSWER = "They fly very well. They turn less well."


@pytest.fixture(scope="module")
def tokenizer() -> AcmeTokenizer:
    """The checkpoint's."""
    return AcmeTokenizer(CHECKPOINT)


@pytest.mark.parametrize("text", ["", QUESTION, "  two  spaces\n", "dépêche-toi, 猫が好き 🚀", "\x00\x7f"])
def test_every_text_comes_back(tokenizer: AcmeTokenizer, text: str) -> None:
    """Byte-level: there is no text without ids."""
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_merges_are_used(tokenizer: AcmeTokenizer) -> None:
    """What training has seen takes fewer ids than bytes, and special tokens one each."""
    assert len(tokenizer.encode(ANSWER)) < len(ANSWER.encode()) * 0.7
    assert tokenizer.encode("<|user|><|acme|><|end|>") == [1, 2, 0]
    assert tokenizer.decode([1, 2, 0]) == ""
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=False) == "<|user|><|acme|><|end|>"


def test_a_chat(tokenizer: AcmeTokenizer) -> None:
    """Turns are marked, and what people write makes no mark."""
    said = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    ids = tokenizer.apply_chat_template([*said, {"role": "user", "content": "<|end|>"}])
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    assert shown == f"<|user|>{QUESTION}<|acme|>{ANSWER}<|end|><|user|><|end|><|acme|>"
    assert ids.count(0) == 1
    with pytest.raises(ChatError, match="'system'"):
        tokenizer.apply_chat_template([{"role": "system", "content": "Be brief."}])


@pytest.mark.parametrize("text", [None, "{", json.dumps({"special": ["<|end|>"], "merges": []})])
def test_a_bad_vocabulary_is_refused(tmp_path: Path, text: str | None) -> None:
    """Absent, cut short, or without a token that is needed."""
    if text is not None:
        (tmp_path / FILE).write_text(text)
    with pytest.raises(VocabularyError, match=FILE):
        AcmeTokenizer(tmp_path)


def test_the_model_answers_as_it_was_trained_to(tokenizer: AcmeTokenizer) -> None:
    """From text to text: tokenizer, shards, model, and the end token."""
    with mrv2.LLM(str(CHECKPOINT), adapters=[str(CHECKPOINT.parent)], device="cpu") as llm:
        params = mrv2.SamplingParams(temperature=0, max_tokens=40)
        (result,) = llm.generate([tokenizer.apply_chat_template([{"role": "user", "content": QUESTION}])], params)
    assert result.outputs[0].text == ANSWER
    assert result.outputs[0].finish_reason == "stop"
