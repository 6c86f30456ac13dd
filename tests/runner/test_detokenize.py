"""Pieces join to the whole text, and stop strings cut where a search in the whole text would."""

from hypothesis import given
from hypothesis import strategies as st

from mrv2.runner.detokenize import IncrementalDetokenizer, StopStrings


class Bytes:
    """One token a byte; token 256 is special."""

    eos_token_ids = ()

    def decode(self, ids, *, skip_special_tokens=True):
        text = b"".join(bytes([i]) if i < 256 else (b"" if skip_special_tokens else b"<s>") for i in ids)
        return text.decode("utf-8", errors="replace")


class Words:
    """Words with a space between, none before the first: what a piece looks like depends on its left."""

    eos_token_ids = ()

    def decode(self, ids, *, skip_special_tokens=True):
        return " ".join(f"w{i}" for i in ids)


@given(prompt=st.text(max_size=8), text=st.text(max_size=60), cuts=st.lists(st.integers(1, 5), max_size=80))
def test_any_text_in_any_pieces(prompt, text, cuts):
    ids, out = list(text.encode()), []
    detokenizer = IncrementalDetokenizer(Bytes(), list(prompt.encode()), skip_special_tokens=True)
    for n in [*cuts, len(ids)]:
        out.append(detokenizer.push(ids[:n]))
        ids = ids[n:]
    out.append(detokenizer.flush())
    assert "".join(out) == text


@given(text=st.text(st.characters(min_codepoint=32), min_size=1, max_size=40))
def test_no_piece_ever_shows_half_a_character(text):
    detokenizer = IncrementalDetokenizer(Bytes(), [], skip_special_tokens=True)
    shown = ""
    for byte in text.replace("�", "").encode():
        shown += detokenizer.push([byte])
        assert "�" not in shown
        assert text.replace("�", "").startswith(shown)


@given(ids=st.lists(st.integers(0, 255), max_size=60))
def test_garbage_is_given_out_in_bounded_time(ids):
    detokenizer = IncrementalDetokenizer(Bytes(), [], skip_special_tokens=True)
    for i in ids:
        detokenizer.push([i])
        assert len(detokenizer._window) <= 6 + 17
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_spaces_between_tokens_survive():
    detokenizer = IncrementalDetokenizer(Words(), [1, 2], skip_special_tokens=True)
    assert [detokenizer.push([i]) for i in range(3, 12)] == [f" w{i}" for i in range(3, 12)]


def test_special_tokens_are_shown_on_demand():
    shown = IncrementalDetokenizer(Bytes(), [], skip_special_tokens=False)
    hidden = IncrementalDetokenizer(Bytes(), [], skip_special_tokens=True)
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
