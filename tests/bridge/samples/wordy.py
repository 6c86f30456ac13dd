# /// adapter
# name = "wordy-sample"
# sdk_api = "0.1"
# architectures = ["WordyForCausalLM"]
# owner = "tests"
# [capabilities]
# chunked_prefill = "both"
# prefix_caching = "both"
# ///
"""An adapter with a tokenizer that nobody else knows: words of a list, one a line, and its own way to write a chat."""

import json

import mrv2
from mrv2_adapter_llama.model import LlamaForCausalLM


class Words:
    def __init__(self, folder):
        self.words = (folder / "words.txt").read_text().split()
        self.eos_token_ids = tuple(json.loads((folder / "ends.json").read_text()))

    def encode(self, text):
        return [self.words.index(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(f"{self.words[i]} " for i in ids if not (skip_special_tokens and i in self.eos_token_ids))

    def apply_chat_template(self, messages, add_generation_prompt=True):
        turns = [f"turn {m['content']}" for m in messages] + ["turn"] * add_generation_prompt
        return self.encode(" ".join(turns))


@mrv2.hookimpl
def mrv2_model(ctx):
    return LlamaForCausalLM


@mrv2.hookimpl
def mrv2_tokenizer(ctx):
    assert ctx.config.vocab_size == ctx.raw_config["vocab_size"]
    return Words(ctx.path)
