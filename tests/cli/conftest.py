"""A config alone, and what a page of ours must not do."""

import json
import re
from html.parser import HTMLParser

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "our-shape.json"
    file.write_text(json.dumps(CONFIG))
    return file


class References(HTMLParser):
    """Whatever a page would fetch or run."""

    def __init__(self):
        super().__init__()
        self.found, self.tags = [], set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.found += [(tag, name) for name, _ in attrs if name in ("src", "href", "xlink:href", "data", "srcset")]


@pytest.fixture(scope="session")
def check_self_contained():
    """check_self_contained(html): it fetches nothing and runs nothing."""
    return _check_self_contained


def _check_self_contained(html):
    page = References()
    page.feed(html)
    assert page.found == []
    assert "svg" in page.tags
    assert not page.tags & {"script", "link", "iframe", "img"}
    assert not re.search(r"url\(|@import|https?:", html)
