"""Real weights on a GPU in bfloat16, against transformers in bfloat16 and in float32 on the same card.

Where the bounds come from. A bfloat16 number has 8 significant bits. The highest logits of this model lie between 16
and 32, where neighbours are 0.125 apart: rounding the result alone moves a log-probability by up to 0.06 in each of
two programs, by 0.04 for both together on average, before anything inside the 30 layers is rounded differently. So
two right programs differ by some hundredths on average and by a few tenths at worst (0.03 to 0.05 and 0.5 when these
tests run on a CPU); one wrong rotation, mask or scale moves them by whole numbers. MEAN and MAX stand between. The
sharper test needs no such number: ours may be no further from float32 than transformers is in bfloat16.

The most likely token is compared at every position, up to what bfloat16 can tell apart: where the reference's first two
logits are a step of 0.125 apart or less, two right programs choose differently now and then (so does the reference in
float32, at 2 to 4 positions of 100), and either choice agrees. The share of equal choices is shown beside it.
"""

import importlib.metadata

import pytest
import torch

from mrv2 import LLM, SamplingParams
from mrv2.frontend.build import load
from mrv2.frontend.engine_config import EngineConfig
from mrv2.loader.bundled import bundled_models
from mrv2.testing.ragged import RaggedBatch

pytestmark = [pytest.mark.weights, pytest.mark.slow]

MODEL = "smollm2"
MEAN, MAX = 0.08, 1.0
"""Of the absolute differences of log-probabilities of given tokens."""
AGREEMENT, STEP = 0.99, 0.125
"""Share of positions where our most likely token is the reference's, or to it at most a step less likely; and of those
where the reference's first two are further apart, so that there is no tie."""
NEW = 64

PROMPTS = [
    "The history of computing began",
    "def fibonacci(n):\n",
    "In the year 2050, the city of Paris",
    "Q: What is the boiling point of water?\nA:",
    "Il était une fois",
    "Dear friend, I am writing to you about the sea,",
    "1, 1, 2, 3, 5, 8,",
    "A recipe for bread: first",
]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module", autouse=True)
def _present():
    package = bundled_models()[MODEL].package
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{package} isn't installed: make the bundle with `python tests/gpu/bundle.py --model-parts`")


@pytest.fixture(scope="module")
def llm(pytestconfig):
    device = pytestconfig.getoption("--device")
    with LLM(MODEL, dtype="bfloat16", device=device, max_model_len=512, max_num_seqs=8, kv_memory=1 << 28) as llm:
        yield llm


@pytest.fixture(scope="module")
def theirs(llm, pytestconfig):
    """theirs(ids, dtype) -> log-probabilities of every next token, [len(ids), vocab] float32, by transformers."""
    from transformers import AutoModelForCausalLM

    device, models = pytestconfig.getoption("--device"), {}

    def logprobs(ids, dtype):
        if dtype not in models:
            path = llm.model.config.path
            models[dtype] = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval()
        with torch.inference_mode():
            logits = models[dtype](input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0]
        return logits.float().log_softmax(-1).cpu()

    return logprobs


def of_tokens(logprobs, tokens):
    return logprobs.gather(-1, tokens[:, None])[:, 0]


def check(ours, bf16, fp32):
    """Three vectors of log-probabilities of the same tokens."""
    difference, ours_off, theirs_off = (ours - bf16).abs(), (ours - fp32).abs(), (bf16 - fp32).abs()
    report = (
        f"differences: mean {difference.mean():.4f}, max {difference.max():.4f}; "
        f"from float32: ours {ours_off.mean():.4f}, transformers' {theirs_off.mean():.4f}; {len(ours)} positions"
    )
    print(report)
    assert difference.mean() < MEAN, report
    assert difference.max() < MAX, report
    assert ours_off.mean() < 1.25 * theirs_off.mean(), report


def check_top(ours, bf16, fp32):
    """Our most likely tokens, [n], and the references' log-probabilities, [n, vocab]."""
    best, second = bf16.topk(2).values.T
    clear, same = best - second > STEP, bf16.argmax(-1) == ours
    agree = of_tokens(bf16, ours) >= best - STEP
    reference = (bf16.argmax(-1) == fp32.argmax(-1)).float().mean()
    report = (
        f"top-1 agreement: {agree.float().mean():.4f} of {len(agree)} positions, "
        f"{same[clear].float().mean():.4f} of {int(clear.sum())} clear ones, "
        f"equal choices {same.float().mean():.4f}; transformers' own with float32: {reference:.4f}"
    )
    print(report)
    assert clear.float().mean() > 0.8, report
    assert same[clear].float().mean() >= AGREEMENT, report
    assert agree.float().mean() >= AGREEMENT, report
    assert same.float().mean() > reference - 0.01, report


def test_decoded_logprobs_equal_transformers(llm, theirs):
    """The engine generates in one batch; the reference is then given the same tokens."""
    params = SamplingParams(temperature=0, max_tokens=NEW, logprobs=1, ignore_eos=True)
    ours, tops, bf16, fp32 = [], [], [], []
    for result in llm.generate(PROMPTS, params):
        prompt, tokens = list(result.prompt_token_ids), list(result.outputs[0].token_ids)
        assert len(tokens) == NEW
        ours += [t.logprob for t in result.outputs[0].logprobs]
        tops += tokens
        after = slice(len(prompt) - 1, -1)
        bf16.append(theirs(prompt + tokens, torch.bfloat16)[after])
        fp32.append(theirs(prompt + tokens, torch.float32)[after])
    bf16, fp32, tops = torch.cat(bf16), torch.cat(fp32), torch.tensor(tops)
    check(torch.tensor(ours), of_tokens(bf16, tops), of_tokens(fp32, tops))
    check_top(tops, bf16, fp32)


def test_prefilled_logprobs_equal_transformers(llm, theirs, pytestconfig):
    """Chunks of many sizes beside each other, every position looked at, on text that the model didn't choose."""
    loaded = load(MODEL, EngineConfig(device=pytestconfig.getoption("--device"), dtype="bfloat16"))
    texts = [loaded.tokenizer.encode(text) for text in (__doc__, " ".join(PROMPTS), check.__doc__)]
    batch = RaggedBatch(loaded.module, loaded, block_size=16)  # of its second argument it reads `caches`
    logits = batch.logits(texts, chunks=[50, 1, 17, 64, 1, 33], padding=2)
    ours = torch.cat([rows.float().log_softmax(-1).cpu()[:-1] for rows in logits])
    bf16, fp32 = (torch.cat([theirs(ids, dtype)[:-1] for ids in texts]) for dtype in (torch.bfloat16, torch.float32))
    tokens = torch.tensor([token for ids in texts for token in ids[1:]])
    check(*(of_tokens(logprobs, tokens) for logprobs in (ours, bf16, fp32)))
    check_top(ours.argmax(-1), bf16, fp32)


def test_the_capital_of_france(llm):
    result = llm.generate([llm.chat_prompt(QUESTION)], SamplingParams(temperature=0, max_tokens=24))[0]
    assert result.outputs[0].text == "The capital of France is Paris."
    assert result.outputs[0].finish_reason == "stop"
