"""Pieces join to the whole text, and stop strings cut where a search in the whole text would."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mrv2.frontend.detokenize import IncrementalDetokenizer
from mrv2.frontend.text_stream import StopStrings
from mrv2.loader.tokenizer import FolderTokenizer
from mrv2.testing.byte_tokenizer import ByteTokenizer


class Words:
    """Words with a space between, none before the first: what a piece looks like depends on its left."""

    eos_token_ids = ()

    def decode(self, ids, *, skip_special_tokens=True):
        return " ".join(f"w{i}" for i in ids)


def push(detokenizer, tokenizer, ids, *, batched):
    """Push tokens, with the texts that a batch would bring or without."""
    return detokenizer.push(ids, tokenizer.decode_batch(detokenizer.windows(ids)) if batched else ())


@given(
    prompt=st.text(max_size=8),
    text=st.text(max_size=60),
    cuts=st.lists(st.integers(1, 5), max_size=80),
    batched=st.booleans(),
)
def test_any_text_in_any_pieces(prompt, text, cuts, batched):
    ids, out = list(text.encode()), []
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), list(prompt.encode()), skip_special_tokens=True)
    for n in [*cuts, len(ids)]:
        out.append(push(detokenizer, ByteTokenizer(), ids[:n], batched=batched))
        ids = ids[n:]
    out.append(detokenizer.flush())
    assert "".join(out) == text
    at_once = IncrementalDetokenizer(ByteTokenizer(), list(prompt.encode()), skip_special_tokens=True)
    ids = list(text.encode())
    assert at_once.whole(ids, ByteTokenizer().decode_batch(at_once.windows(ids))) == text


@given(text=st.text(st.characters(min_codepoint=32, exclude_categories=("Cs",)), min_size=1, max_size=40))
def test_no_piece_ever_shows_half_a_character(text):
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [], skip_special_tokens=True)
    shown = ""
    for byte in text.replace("�", "").encode():
        shown += detokenizer.push([byte])
        assert "�" not in shown
        assert text.replace("�", "").startswith(shown)


@given(ids=st.lists(st.integers(0, 256), max_size=60))
def test_garbage_is_given_out_in_bounded_time(ids):
    detokenizer = IncrementalDetokenizer(ByteTokenizer(), [], skip_special_tokens=True)
    for i in ids:
        detokenizer.push([i])
        assert len(detokenizer._window) <= 6 + 2 * 17
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_spaces_between_tokens_survive():
    detokenizer = IncrementalDetokenizer(Words(), [1, 2], skip_special_tokens=True)
    assert [detokenizer.push([i]) for i in range(3, 12)] == [f" w{i}" for i in range(3, 12)]


def test_special_tokens_are_shown_on_demand():
    shown = IncrementalDetokenizer(ByteTokenizer(), [], skip_special_tokens=False)
    hidden = IncrementalDetokenizer(ByteTokenizer(), [], skip_special_tokens=True)
    assert (shown.push([65, 256]), hidden.push([65, 256])) == ("A<s>", "A")


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 4), max_size=40),
)
def test_stop_strings_cut_at_the_first_match(text, stops, cuts):
    finder, rest, out = StopStrings(stops), text, ""
    for n in [*cuts, len(text)]:
        out += finder.push(rest[:n])
        rest = rest[n:]
        assert text.startswith(out)
        if finder.found is not None:
            break
    if finder.found is None:
        assert not any(s in text for s in stops)
        assert out + finder.flush() == text
    else:
        assert text[len(out) :].startswith(finder.found)
        assert not any(s in out for s in stops)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A tokenizer as Llama 2 and Mistral have it: unknown characters are spelled in byte tokens."""
    letters = "▁abcdefghijklmnopqrstuvwxyz.,!"
    names = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    folder = tmp_path_factory.mktemp("bytes")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return FolderTokenizer(folder)


@pytest.mark.parametrize(
    "text", ["hi 日本語", "😀😁😂🤣", "привет, мир", "a é b ü c", "世界😀世界", "x" * 30 + "😀" * 9]
)
@pytest.mark.parametrize("prompt", ["", "a b", "so 😀", "日本", "日本é"])
def test_byte_fallback_tokenizers(byte_fallback, prompt, text):
    prompt_ids = byte_fallback.encode(prompt) if prompt else [1]
    ids = byte_fallback.encode(prompt + text)[len(prompt_ids) :] if prompt else byte_fallback.encode(text)
    for size in (1, 2, 3, 7, 1000):
        for batched in (False, True):
            detokenizer = IncrementalDetokenizer(byte_fallback, prompt_ids, skip_special_tokens=True)
            cut = [ids[i : i + size] for i in range(0, len(ids), size)]
            pieces = [push(detokenizer, byte_fallback, part, batched=batched) for part in cut]
            assert "".join([*pieces, detokenizer.flush()]) == text, (size, batched)
    at_once = IncrementalDetokenizer(byte_fallback, prompt_ids, skip_special_tokens=True)
    assert at_once.whole(ids, byte_fallback.decode_batch(at_once.windows(ids))) == text
