"""`mrv2.LLM` as its users call it: batches, streams, stop strings, wrong input, failure, cancellation."""

import asyncio
import threading
import time

import numpy as np
import pytest
from transformers import LlamaConfig

from mrv2 import LLM, SamplingParams
from mrv2.errors import CacheTooSmallError, EngineError, OutputError, RequestError, TokenizerError, UnsupportedError
from mrv2.runner.request import FinishReason
from mrv2.testing.checkpoints import make_checkpoint
from mrv2.testing.naive import NaiveGreedy

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
PROMPTS = ["the cat", "grüße", "猫が", "the rat sat on the", "d"]


@pytest.fixture(scope="module")
def llm(text_model):
    with LLM(str(text_model), max_num_seqs=8, max_num_tokens=64) as llm:
        yield llm


async def collect(llm, prompt, params):
    return [piece async for piece in llm.stream(prompt, params)]


def test_results_come_in_the_order_of_the_prompts(llm):
    together = llm.generate(PROMPTS, GREEDY)
    alone = [llm.generate(p, GREEDY)[0] for p in PROMPTS]
    assert [r.prompt for r in together] == PROMPTS
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]
    assert [r.outputs[0].text for r in together] == [r.outputs[0].text for r in alone]
    assert all(len(r.outputs[0].token_ids) == 30 and r.outputs[0].finish_reason == "length" for r in together)
    assert len({r.outputs[0].token_ids for r in together}) == len(PROMPTS)


def test_each_prompt_may_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    out = llm.generate(PROMPTS[:3], params)
    assert [len(r.outputs[0].token_ids) for r in out] == [1, 5, 9]
    with pytest.raises(RequestError, match="3 prompts, but 2 sets"):
        llm.generate(PROMPTS[:3], params[:2])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pieces_of_a_stream_join_to_the_text(llm, prompt):
    whole = llm.generate(prompt, GREEDY)[0]
    pieces = asyncio.run(collect(llm, prompt, GREEDY))
    assert [p.finished is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    final = pieces[-1].finished
    assert "".join(p.text for p in pieces) == final.outputs[0].text == whole.outputs[0].text
    assert tuple(t for p in pieces for t in p.token_ids) == final.outputs[0].token_ids == whole.outputs[0].token_ids
    assert whole.outputs[0].text == llm.model.tokenizer.decode(whole.outputs[0].token_ids)


def test_a_stop_string_cuts_the_text_and_the_tokens(llm):
    free = llm.generate("the cat", GREEDY)[0].outputs[0]
    at = next(
        i for i in range(5, len(free.text)) if free.text[i : i + 2].isascii() and free.text[:i].count(free.text[i]) == 0
    )
    stop = free.text[at : at + 2]
    for out in (
        llm.generate("the cat", SamplingParams(temperature=0, max_tokens=30, stop=(stop, "never there")))[0].outputs[0],
        asyncio.run(collect(llm, "the cat", SamplingParams(temperature=0, max_tokens=30, stop=stop)))[
            -1
        ].finished.outputs[0],
    ):
        assert out.text == free.text[:at]
        assert out.finish_reason == "stop"
        assert out.stop_reason == stop
        assert out.token_ids == free.token_ids[: len(out.token_ids)]
        assert stop in llm.model.tokenizer.decode(out.token_ids)
        assert stop not in llm.model.tokenizer.decode(out.token_ids[:-1])


def test_stop_token_is_kept_as_id_and_left_out_of_the_text(llm):
    free = llm.generate("the rat", GREEDY)[0].outputs[0]
    stop = free.token_ids[4]
    out = llm.generate("the rat", SamplingParams(temperature=0, stop_token_ids=(stop,)))[0].outputs[0]
    first = free.token_ids.index(stop)
    assert out.token_ids == free.token_ids[: first + 1]
    assert (out.finish_reason, out.stop_reason) == ("stop", stop)
    assert out.text == llm.model.tokenizer.decode(out.token_ids[:-1])


def test_logprobs_are_the_models_own(llm):
    import torch

    from mrv2.testing.naive import transformers_logits

    params = SamplingParams(temperature=0.8, top_k=5, max_tokens=8, logprobs=3, seed=1, ignore_eos=True)
    result = llm.generate("the mat", params)[0]
    logits_of = transformers_logits(llm.model.config.path)
    ids = list(result.prompt_token_ids)
    assert len(result.outputs[0].logprobs) == 8
    for token, entry in zip(result.outputs[0].token_ids, result.outputs[0].logprobs, strict=True):
        want = torch.log_softmax(logits_of(ids), -1)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(want[token].item(), abs=1e-4)
        assert entry.rank == int((want > want[token]).sum()) + 1
        top = want.topk(3)
        assert [t for t, _ in entry.top] == top.indices.tolist()
        assert [v for _, v in entry.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        ids.append(token)


def test_chat_goes_through_the_template(llm):
    ids = llm.chat_prompt([{"role": "user", "content": "the hat"}])
    assert llm.model.tokenizer.decode(ids, skip_special_tokens=False) == "<turn>user: the hat<turn>"


def test_leaving_a_stream_aborts_its_request(llm):
    async def leave():
        stream = llm.stream("the cat", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
        async for _ in stream:
            break
        await stream.aclose()

    before = llm.stats.generated_tokens
    asyncio.run(leave())
    llm.generate("d", SamplingParams(max_tokens=1))  # the engine is free again and answers
    assert llm.stats.generated_tokens - before < 90


def test_cancelling_a_task_aborts_its_request(llm):
    async def cancel():
        task = asyncio.create_task(collect(llm, "d", SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert llm.generate("the cat", GREEDY)[0].outputs[0].finish_reason is FinishReason.LENGTH


def test_interrupting_a_wait_aborts_the_batch(llm, monkeypatch):
    futures = llm.submit(PROMPTS, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True))

    def interrupted(*_):
        raise KeyboardInterrupt

    first = futures[0]
    real, first.result = first.result, interrupted
    with pytest.raises(KeyboardInterrupt):
        llm.wait(futures)
    first.result = real
    results = [f.result(timeout=30) for f in futures]
    assert any(r.outputs[0].finish_reason is FinishReason.ABORT for r in results)


@pytest.mark.parametrize(
    ("prompt", "what"),
    [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([1, 5000, 3], "token id 5000 at position 1 is out of range"),
        ([-1], "token id -1 at position 0 is out of range"),
        ([1] * 128, "the model's context .* holds 128"),
        ([1.5], "not integers"),
    ],
)
def test_wrong_prompts_are_refused_and_nothing_starts(llm, prompt, what):
    steps = llm.stats.steps
    with pytest.raises(RequestError, match=what) as error:
        llm.generate(["the cat", prompt], GREEDY)
    assert error.value.code == "MRV2-401"
    time.sleep(0.05)
    assert llm.stats.steps == steps


def test_a_prompt_longer_than_the_cache_is_refused(text_model):
    with (
        LLM(str(text_model), num_blocks=3, block_size=16) as llm,
        pytest.raises(RequestError, match="the KV cache holds 32"),
    ):
        llm.generate([[1] * 40])


@pytest.mark.parametrize(
    ("settings", "error", "what"),
    [
        ({"kv_memory": 100}, CacheTooSmallError, "at least 2 are needed"),
        ({"max_model_len": 4096}, UnsupportedError, "exceeds the model's context of 128"),
        ({"dtype": "float8"}, UnsupportedError, "dtype='float8'"),
        ({"device": "tpu9"}, UnsupportedError, "device 'tpu9'"),
        ({"depth": 2, "runner": "sync"}, UnsupportedError, "1 with runner='sync'"),
        ({"debug": True, "runner": "sync"}, UnsupportedError, "runner='sync': must be async with debug=True"),
        ({"debug": 1}, UnsupportedError, "debug=1"),
        ({"prefix_caching": 0}, UnsupportedError, "prefix_caching=0: must be true, false, or None"),
        ({"seed": [1]}, UnsupportedError, "seed="),
        ({"max_num_tokens": 4, "max_num_seqs": 8}, UnsupportedError, "at least max_num_seqs"),
        ({"max_seqs": 4}, TypeError, "no setting 'max_seqs'"),
        ({"max_num_seqs": "8"}, UnsupportedError, "max_num_seqs='8'"),
        ({"block_size": 1.5}, UnsupportedError, "block_size=1.5"),
        ({"depth": True}, UnsupportedError, "depth=True"),
        ({"prefix_caching": True, "num_blocks": 10**12}, UnsupportedError, "num_blocks=1000000000000"),
    ],
)
def test_wrong_settings_are_refused(text_model, settings, error, what):
    with pytest.raises(error, match=what):
        LLM(str(text_model), **settings)


def test_without_a_tokenizer_ids_go_in_and_out(tmp_path):
    folder = tmp_path / "model"
    make_checkpoint(folder, LlamaConfig(**SIZES), seed=3)
    oracle = NaiveGreedy.from_transformers(folder)
    with LLM(str(folder)) as llm:
        result = llm.generate([[3, 4, 5]], SamplingParams(temperature=0, max_tokens=5))[0]
        assert result.outputs[0].text is None
        assert list(result.outputs[0].token_ids) == oracle([3, 4, 5], 5)
        for call in (
            lambda: llm.generate("text"),
            lambda: llm.generate([[1]], SamplingParams(stop="x")),
            lambda: llm.chat_prompt([{"role": "user", "content": "x"}]),
        ):
            with pytest.raises(TokenizerError, match="needs a tokenizer"):
                call()
        pieces = asyncio.run(collect(llm, [3, 4, 5], SamplingParams(temperature=0, max_tokens=5)))
        assert tuple(t for p in pieces for t in p.token_ids) == result.outputs[0].token_ids


def test_an_engine_failure_reaches_everyone_who_waits(text_model):
    llm = LLM(str(text_model))
    calls = 0
    lm_head = llm.model.module.lm_head
    forward = lm_head.forward

    def failing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 3:
            raise ZeroDivisionError("a kernel broke")
        return forward(*args, **kwargs)

    lm_head.forward = failing
    futures = llm.submit(PROMPTS, GREEDY)
    for future in futures:
        with pytest.raises(EngineError, match="ZeroDivisionError: a kernel broke") as error:
            future.result(timeout=30)
        assert isinstance(error.value.__cause__, ZeroDivisionError)
    with pytest.raises(EngineError):
        llm.submit(["d"], GREEDY)
    with pytest.raises(EngineError):
        asyncio.run(collect(llm, "d", GREEDY))
    llm.close()


def test_closing_while_requests_run_leaves_nobody_waiting(text_model):
    llm = LLM(str(text_model))
    futures = llm.submit(PROMPTS, SamplingParams(temperature=0, max_tokens=110, ignore_eos=True))
    llm.close()
    llm.close()
    for future in futures:
        with pytest.raises(EngineError, match="closed"):
            future.result(timeout=30)
    with pytest.raises(EngineError, match="closed"):
        llm.submit(["d"], GREEDY)
    assert not [t for t in threading.enumerate() if t.name.startswith("mrv2-") and t in llm._driver._threads]


def test_many_threads_may_submit_at_once(llm):
    results = {}

    def work(i):
        results[i] = llm.generate(PROMPTS[i % 5], GREEDY)[0].outputs[0].token_ids

    threads = [threading.Thread(target=work, args=(i,)) for i in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert len(results) == 12
    assert all(results[i] == results[i % 5] for i in range(12))


def test_many_streams_at_once(llm):
    async def all_streams():
        return await asyncio.gather(*(collect(llm, p, GREEDY) for p in PROMPTS * 2))

    texts = ["".join(p.text for p in pieces) for pieces in asyncio.run(all_streams())]
    assert texts[:5] == texts[5:]
    assert texts[:5] == [r.outputs[0].text for r in llm.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("kind", [np.array, lambda ids: [np.int64(i) for i in ids], tuple, list])
def test_ids_may_be_any_kind_of_integers(llm, kind):
    want = llm.generate([[1, 2, 3]], GREEDY)[0].outputs[0].token_ids
    for prompts in (kind([1, 2, 3]), [kind([1, 2, 3])]):
        assert llm.generate(prompts, GREEDY)[0].outputs[0].token_ids == want


@pytest.mark.parametrize(
    "prompts", [None, 5, {}, {"a": 1}, [None], [5.0], [[None]], [[[1, 2], [3]]], "a\ud800", b"abc"]
)
def test_what_is_no_prompt_is_refused(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, GREEDY)


def test_on_done_runs_here_and_may_generate_itself(llm):
    seen, threads = [], set()

    def on_done(result):
        threads.add(threading.current_thread())
        seen.append((result.request_id, llm.generate("d", SamplingParams(max_tokens=2))[0].request_id))

    results = llm.generate(PROMPTS, GREEDY, on_done=on_done)
    assert sorted(a for a, _ in seen) == sorted(r.request_id for r in results)
    assert threads == {threading.current_thread()}


def test_on_done_that_raises_aborts_the_rest(llm):
    def on_done(result):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True), on_done=on_done)
    assert llm.generate("d", GREEDY)[0].outputs[0].finish_reason == "length"


def test_a_tokenizer_that_fails_on_one_request_loses_only_that(text_model):
    with LLM(str(text_model)) as llm:
        decode = llm.model.tokenizer.decode
        bad = llm.generate("the rat", GREEDY)[0].outputs[0].token_ids[0]

        def failing(ids, *, skip_special_tokens=True):
            if bad in ids:
                raise KeyError("no such token")
            return decode(ids, skip_special_tokens=skip_special_tokens)

        good = next(p for p in PROMPTS if bad not in llm.generate(p, GREEDY)[0].outputs[0].token_ids)
        llm.model.tokenizer.decode = failing
        llm.model.tokenizer.decode_batch = lambda batch, *, skip_special_tokens=True: [failing(ids) for ids in batch]
        for watched in (False, True):
            params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=("never",) if watched else ())
            futures = llm.submit(["the rat", good], params)
            with pytest.raises(OutputError, match="no such token"):
                futures[0].result(timeout=60)
            assert len(futures[1].result(timeout=60).outputs[0].token_ids) == 30
        with pytest.raises(OutputError):
            asyncio.run(collect(llm, "the rat", GREEDY))
        assert llm.generate(good, GREEDY)[0].outputs[0].finish_reason == "length"


def test_table_that_memory_cannot_hold_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path / "model", LlamaConfig(**SIZES, max_position_embeddings=10**9))
    with pytest.raises(UnsupportedError, match="max_num_seqs=64 and max_model_len=1000000000 need token tables"):
        LLM(str(folder))
