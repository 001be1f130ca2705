"""What is private in SGLang is checked at the start: a name that changed is refused by its name, nothing is computed."""

from __future__ import annotations

from typing import Any

import pytest
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor import model_runner
from sglang.srt.speculative import ngram_info

from verify_service.engine import Unsupported
from verify_service.engines.sglang import private, release


def test_the_pinned_release_has_every_name() -> None:
    """The installed SGLang is the pinned one, and nothing that is used is missing from it."""
    release.check_version()
    assert list(private.gaps()) == []
    private.check_names()


def test_a_missing_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Module, class or method: the refusal names what is missing, and the release that has it."""
    monkeypatch.delattr(KVIndexTranslator, "own_plan")
    monkeypatch.delattr(model_runner, "ModelRunnerOutput")
    with pytest.raises(Unsupported) as caught:
        private.check_names()
    message = str(caught.value)
    assert "no sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.own_plan" in message
    assert "no sglang.srt.model_executor.model_runner.ModelRunnerOutput" in message
    assert "Install sglang==0.5.23" in message


def test_a_missing_module_is_refused() -> None:
    """A module that moved is named."""
    moved = private.Name("sglang.srt.mem_cache.allocator.gone", "Pool")
    assert next(private.gaps([moved])).startswith("no module sglang.srt.mem_cache.allocator.gone")


def test_a_renamed_parameter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that takes its mask under another name is named with the parameter."""

    def renamed(draft_token: Any, tree_mask: Any, positions: Any, draft_token_num: int) -> None:
        """As the original but for one name."""

    monkeypatch.setattr(ngram_info, "NgramVerifyInput", renamed)
    with pytest.raises(Unsupported, match=r"ngram_info\.NgramVerifyInput has no parameter custom_mask"):
        private.check_names()


def test_another_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both releases are named."""
    monkeypatch.setattr(release, "installed_version", lambda: "0.5.24")
    with pytest.raises(Unsupported, match=r"sglang 0\.5\.23, 0\.5\.24 is installed"):
        release.check_version()
