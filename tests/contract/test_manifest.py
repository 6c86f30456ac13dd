"""`adapter.toml`: versions and fields."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mrv2.api import ApiVersion
from mrv2.errors import ManifestError, SdkApiError
from mrv2.manifest import Capability, Manifest, Support, accepts_api, check_api, parse_api, validate

versions = st.builds(ApiVersion, st.integers(0, 12), st.integers(0, 12))
GOOD = {"name": "acme", "sdk_api": "0.1", "architectures": ["AcmeForCausalLM"], "owner": "nobody"}


@given(wanted=versions, offered=versions)
def test_equal_major_and_no_newer_minor(wanted, offered):
    accepted = accepts_api(wanted, offered)
    assert accepted == (wanted[0] == offered[0] and wanted[1] in range(offered[1] + 1))
    assert parse_api(str(wanted)) == wanted


@given(st.text(alphabet="0123456789. -+x", max_size=8) | st.none() | st.floats() | st.integers() | st.lists(st.text()))
def test_any_api_is_judged_before_the_other_fields(value):
    failure = check_api({"sdk_api": value, "nonsense": [1]}, "here")
    assert (failure is None) == (value in ("0.0", "0.1"))
    assert failure is None or isinstance(failure, ManifestError | SdkApiError)


def test_all_wrong_fields_are_listed_at_once():
    failure = validate(GOOD | {"kind": "toy", "owner": "", "capabilities": {"flying": "both", "lora": "maybe"}}, "here")
    assert isinstance(failure, ManifestError)
    for name in ("kind", "owner", "capabilities.flying", "capabilities.lora"):
        assert name in failure.what


def test_a_capability_left_out_is_none():
    manifest = validate(GOOD | {"capabilities": {"lora": "both"}}, "here")
    assert isinstance(manifest, Manifest)
    assert {c: manifest.support(c) for c in Capability if manifest.support(c) is not Support.NO} == {
        Capability.LORA: Support.BOTH
    }
    assert [h for h in ("native", "vllm") if Support.VLLM.on(h)] == ["vllm"]


def test_a_drafter_names_its_targets():
    drafts = {"method": "eagle3", "targets": ["AcmeForCausalLM"]}
    manifest = validate(GOOD | {"kind": "drafter", "drafts": drafts}, "here")
    assert isinstance(manifest, Manifest)
    assert manifest.drafts is not None
    assert manifest.drafts.targets == ("AcmeForCausalLM",)
    assert isinstance(validate(GOOD | {"drafts": {"method": "eagle3", "targets": []}}, "here"), ManifestError)
