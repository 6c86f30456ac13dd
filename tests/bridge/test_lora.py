"""Low-rank adapters, several in one batch: what transformers computes with the products added to its weights."""

import json

import pytest
import torch
import transformers
from safetensors.torch import save_file

pytestmark = pytest.mark.slow

RANK, ALPHA = 4, 8
MODULES = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}
LENS = (3, 40, 17, 33, 21, 9)


@pytest.fixture(scope="module", params=["LlamaConfig", "Qwen3Config"])
def loras(request, family, tmp_path_factory):
    """Two folders as PEFT writes them, one with attention alone, and the reference of each; None: without."""
    one = family(request.param, num_attention_heads=2, num_key_value_heads=1, attention_bias=True)
    made = {None: (None, one)}
    for seed, kinds in ((1, ("self_attn",)), (2, ("self_attn", "mlp"))):
        folder = tmp_path_factory.mktemp("lora")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            one.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        names = [name for kind in kinds for name in MODULES[kind]]
        for name, module in model.named_modules():
            if name.rpartition(".")[2] in names:
                a = torch.randn(RANK, module.in_features, generator=generator) * module.in_features**-0.5
                b = torch.randn(module.out_features, RANK, generator=generator) * 0.3
                tensors[f"base_model.model.{name}.lora_A.weight"] = a
                tensors[f"base_model.model.{name}.lora_B.weight"] = b
                module.weight.data += ALPHA / RANK * (b @ a)
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": names, "bias": "none"}
        (folder / "adapter_config.json").write_text(json.dumps(config))

        @torch.inference_mode()
        def logprobs(ids, options, model=model):
            return model(torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)

        made[seed] = (folder, type(one)(one.folder, one.architecture, logprobs))
    return made


def test_a_mixed_batch(loras, engine, ragged):
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    prompts, chosen = ragged(LENS), [None, 1, 2, 1, None, 2]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False, logprobs=0)
    requests = {n: LoRARequest(f"lora{n}", n, str(loras[n][0])) for n in (1, 2)}
    plain = loras[None][1]
    # One place more than adapters: vLLM's kernels for CPUs look up requests without one in the last place.
    with engine(
        plain.folder, **plain.settings, enable_lora=True, max_loras=3, max_lora_rank=8, max_num_batched_tokens=32
    ) as llm:
        results = llm.generate(
            [TokensPrompt(prompt_token_ids=p) for p in prompts],
            params,
            lora_request=[requests.get(n) for n in chosen],
            use_tqdm=False,
        )
    said = set()
    for prompt, n, result in zip(prompts, chosen, results, strict=True):
        tokens = list(result.outputs[0].token_ids)
        logprobs = [step[t].logprob for step, t in zip(result.outputs[0].logprobs, tokens, strict=True)]
        loras[n][1].check([prompt], [(tokens, logprobs, 0)])
        base = plain.logprobs([*prompt, *tokens], {})[len(prompt) - 1 : -1].argmax(-1).tolist()
        said.add((n is None, tokens == base))
    assert said == {(True, True), (False, False)}  # control: without theirs, the others say something else
