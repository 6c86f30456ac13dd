"""The conformance kit, on a small model of each architecture."""

from mrv2.testing import AdapterConformance


class TestQwen(AdapterConformance):
    adapter = "qwen"
