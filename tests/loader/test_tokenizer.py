"""The folder's tokenizer, an adapter's, none, and broken ones."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mrv2.context import AdapterContext
from mrv2.errors import TokenizerError
from mrv2.loader.tokenizer import load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_tokenizer(folder, template=None):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


@pytest.fixture
def context(tmp_path):
    return AdapterContext(architecture="X", path=tmp_path)


@pytest.mark.parametrize("text", ["hello , world !", "grüße 日本 🙂", "", "  two  spaces"])
def test_text_goes_there_and_back(tmp_path, context, text):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(context)
    ids = tokenizer.encode(text)
    assert all(type(i) is int for i in ids)
    assert tokenizer.decode(ids) == text


def test_special_tokens(tmp_path, context):
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(context)
    (end,) = tokenizer.eos_token_ids
    ids = [*tokenizer.encode("hi"), end]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "hi<end>"


class Shouting(PreTrainedTokenizerFast):
    """One whose `decode` is its own."""

    def decode(self, *args, **kwargs):
        return super().decode(*args, **kwargs).upper()


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, Shouting])
def test_a_batch_is_decoded_as_each_of_it(tmp_path, context, monkeypatch, kind, size):
    write_tokenizer(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", kind.from_pretrained)
    tokenizer = load_tokenizer(context)
    (end,) = tokenizer.eos_token_ids
    batch = [[*tokenizer.encode("grüße 日本 🙂 , a !")[i % 7 :], end, 10**6] for i in range(size)]
    for skip in (True, False):
        want = [tokenizer.hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) for ids in batch]
        assert tokenizer.decode_batch(batch, skip_special_tokens=skip) == want
        assert [tokenizer.decode(ids, skip_special_tokens=skip) for ids in batch] == want
    assert tokenizer.decode_batch([]) == []


def test_chat(tmp_path, context):
    write_tokenizer(tmp_path, TEMPLATE)
    tokenizer = load_tokenizer(context)
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.apply_chat_template(messages)) == "user:hi;a:"
    assert tokenizer.decode(tokenizer.apply_chat_template(messages, add_generation_prompt=False)) == "user:hi;"


def test_chat_without_a_template(tmp_path, context):
    write_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match="no chat template"):
        load_tokenizer(context).apply_chat_template([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses(tmp_path, context):
    write_tokenizer(tmp_path, "{{ raise_exception('only users') }}")
    with pytest.raises(TokenizerError, match="only users"):
        load_tokenizer(context).apply_chat_template([{"role": "system", "content": "hi"}])


def test_no_tokenizer_is_none(context):
    assert load_tokenizer(context) is None
    assert load_tokenizer(AdapterContext(architecture="X")) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xff", b'{"model": 3}'])
def test_a_broken_one_is_an_error(tmp_path, context, content):
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="can't read it"):
        load_tokenizer(context)


def test_an_adapters_own_comes_first_and_may_be_minimal(tmp_path, context, adapter):
    class Letters:
        def encode(self, text):
            return [ord(c) for c in text]

        def decode(self, ids):
            return "".join(map(chr, ids))

    write_tokenizer(tmp_path)
    adapter.own_tokenizer = Letters()
    tokenizer = load_tokenizer(context, adapter)
    assert tokenizer.encode("ab") == [97, 98]
    assert tokenizer.decode((97, 98), skip_special_tokens=True) == "ab"
    assert tokenizer.decode_batch([[97], [], [98, 99]]) == ["a", "", "bc"]
    assert tokenizer.eos_token_ids == ()
    with pytest.raises(TokenizerError, match="Letters"):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize("ids", [7, "</s>", [1.5], ["a"]])
def test_an_adapters_end_tokens_are_checked(context, adapter, ids):
    adapter.own_tokenizer = SimpleNamespace(encode=list, decode=lambda ids: "", eos_token_ids=ids)
    with pytest.raises(TokenizerError, match=r"eos_token_ids is .*, expected token ids"):
        load_tokenizer(context, adapter)


@pytest.mark.parametrize(("ids", "want"), [(None, ()), ((), ()), ([3, 5], (3, 5))])
def test_an_adapters_end_tokens_are_used(context, adapter, ids, want):
    adapter.own_tokenizer = SimpleNamespace(encode=list, decode=lambda ids: "", eos_token_ids=ids)
    assert load_tokenizer(context, adapter).eos_token_ids == want


def test_a_decode_of_another_language_without_signature_will_do(context, adapter):
    adapter.own_tokenizer = SimpleNamespace(encode=list, decode=getattr)
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(getattr)
    assert load_tokenizer(context, adapter).eos_token_ids == ()
