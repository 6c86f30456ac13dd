"""Tokens of many steps become one piece, at the right time: waiting, waking, carrying to an event loop."""

import asyncio
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrv2.errors import OutputError
from mrv2.frontend.courier import Courier, PieceQueue
from mrv2.frontend.event_box import EventBox
from mrv2.frontend.pending import PendingTokens
from mrv2.frontend.results import StreamOutput
from mrv2.frontend.text_stream import TextStream
from mrv2.testing.byte_tokenizer import ByteTokenizer

STEPS = st.lists(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 99)), max_size=8), max_size=12)


# -- tokens of many steps ------------------------------------------------------------------------------


@given(STEPS, st.lists(st.one_of(st.none(), st.lists(st.integers(0, 6), max_size=3)), max_size=12))
def test_pending_tokens_against_lists(steps, takes):
    pending, want = PendingTokens(), {}
    for step, numbers in zip(steps, [*takes, *[[]] * len(steps)], strict=False):
        pending.add(*np.array(step, np.int64).reshape(-1, 2).T)
        for number, token in step:
            want.setdefault(number, []).append(token)
        assert bool(pending) == bool(want)
        taken = {n: want.pop(n) for n in list(want) if numbers is None or n in numbers}
        assert pending.take(numbers) == taken
    assert pending.take() == want
    assert not pending


@given(
    text=st.text("abcé😀", max_size=40),
    stops=st.lists(st.text("abcé", min_size=1, max_size=3), min_size=1, max_size=2),
    cuts=st.lists(st.integers(1, 9), max_size=40),
)
def test_a_stop_string_is_found_at_the_same_token_in_any_pieces(text, stops, cuts):
    ids, seen = list(text.encode()), []
    for sizes in ([1] * len(ids), [*cuts, len(ids)]):
        stream, rest, out, count = TextStream(ByteTokenizer(), [], stops=stops, skip_special_tokens=True), ids, "", 0
        for n in sizes:
            piece, num_seen = stream.push(rest[:n], ByteTokenizer().decode_batch(stream.windows(rest[:n])))
            out, count, rest = out + piece, count + num_seen, rest[n:]
            if stream.found is not None or not rest:
                break
        out += stream.flush()
        assert out == stream.text
        seen.append((out, count, stream.found))
    assert seen[0] == seen[1]
    if seen[0][2] is None:
        assert seen[0][0] == text


# -- the thread's box ----------------------------------------------------------------------------------


def taken_in_thread(box, rest_until, *, waiting=False):
    """A thread that takes, and where it puts what it got."""
    got = []
    thread = threading.Thread(target=lambda: got.append(box.take(rest_until, waiting=waiting)), daemon=True)
    thread.start()
    return thread, got


def test_a_rest_ends_with_what_is_urgent():
    box = EventBox(8)
    thread, got = taken_in_thread(box, time.monotonic() + 60)
    box.put(1, urgent=False)
    box.put(2, urgent=False)
    time.sleep(0.05)
    assert not got
    box.put(3, urgent=True)
    thread.join(10)
    assert got == [[1, 2, 3]]


def test_after_the_rest_anything_will_do():
    box = EventBox(8)
    thread, got = taken_in_thread(box, time.monotonic() + 0.05)
    time.sleep(0.15)
    assert not got
    box.put(1, urgent=False)
    thread.join(10)
    assert got == [[1]]
    box.put(2, urgent=False)
    assert box.take(0.0, waiting=False) == [2]


def test_what_waits_is_not_forgotten():
    start = time.monotonic()
    assert EventBox(8).take(start + 0.05, waiting=True) == []
    assert time.monotonic() >= start + 0.05


def test_a_full_box_holds_the_writer_up_until_somebody_takes():
    box = EventBox(4)
    for i in range(4):
        box.put(i, urgent=False)
    writer = threading.Thread(target=box.put, args=(4,), kwargs={"urgent": False})
    writer.start()
    time.sleep(0.05)
    assert writer.is_alive()
    assert box.take(time.monotonic() + 60, waiting=False) == [0, 1, 2, 3]  # before it is full, the rest is over
    writer.join(10)
    box.close()
    assert box.take(time.monotonic() + 60, waiting=False) == [4]
    assert box.take(time.monotonic() + 60, waiting=True) is None


def test_a_box_that_nobody_reads_holds_nobody_up():
    box = EventBox(2)
    writer = threading.Thread(target=lambda: [box.put(i, urgent=True) for i in range(5)])
    writer.start()
    time.sleep(0.02)
    box.drop_all()
    writer.join(10)
    assert not writer.is_alive()


# -- to an event loop ----------------------------------------------------------------------------------


def piece(text, finished=None):
    return StreamOutput(text=text, token_ids=tuple(text.encode()), finished=finished)


def test_a_loop_is_woken_once_for_all_that_was_posted():
    async def main():
        loop = asyncio.get_running_loop()
        calls, real = [], loop.call_soon_threadsafe
        loop.call_soon_threadsafe = lambda *args: (calls.append(args[0]), real(*args))[1]
        courier = Courier(loop)
        queues = [PieceQueue(loop, courier) for _ in range(20)]
        readers = [asyncio.create_task(q.get()) for q in queues]
        for round in "ab":
            for q in queues:
                q.post(piece(round))
            courier.ring()
            courier.ring()
        got = await asyncio.gather(*readers)
        return calls, [p.text for p in got], courier

    calls, texts, courier = asyncio.run(main())
    assert len(calls) == 1
    assert texts == ["ab"] * 20
    assert courier.take_cost() >= 0


def test_pieces_posted_under_way_come_next():
    async def main():
        loop = asyncio.get_running_loop()
        queue = PieceQueue(loop, Courier(loop))

        def write():
            for c in "abcdefghij" * 20:
                queue.post(piece(c))
                queue.courier.ring()
            queue.post(piece("", finished="result"))
            queue.courier.ring()

        thread = threading.Thread(target=write)
        thread.start()
        text, ids = "", ()
        while True:
            got = await asyncio.wait_for(queue.get(), 10)
            text, ids = text + got.text, ids + got.token_ids
            if got.finished:
                thread.join()
                return text, bytes(ids).decode()

    assert asyncio.run(main()) == ("abcdefghij" * 20,) * 2


def test_what_a_reader_causes_comes_too():
    async def main():
        loop = asyncio.get_running_loop()
        queue = PieceQueue(loop, Courier(loop))
        for c in "abc":  # from the second on, the courier has arrived and not left yet
            queue.post(piece(c))
            queue.courier.ring()
            assert (await queue.get()).text == c

    async def in_time():
        await asyncio.wait_for(main(), 10)

    asyncio.run(in_time())


def test_a_failure_comes_after_the_pieces_before_it():
    async def main():
        loop = asyncio.get_running_loop()
        queue = PieceQueue(loop, Courier(loop))
        for item in (piece("a"), piece("b"), OutputError("x", where="y", fix="z")):
            queue.post(item)
        queue.courier.ring()
        assert (await queue.get()).text == "ab"
        for _ in range(2):
            with pytest.raises(OutputError):
                await asyncio.wait_for(queue.get(), 10)

    asyncio.run(main())


def test_a_loop_that_is_gone_is_left_alone():
    async def make():
        loop = asyncio.get_running_loop()
        return PieceQueue(loop, Courier(loop))

    queue = asyncio.run(make())
    queue.post(piece("a"))
    queue.courier.ring()
    assert not queue.courier._posted
