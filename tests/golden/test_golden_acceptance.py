"""Golden acceptance: a recorded trace with the length that the drafter reaches on it, and every classic mistake caught by it.

Each of these mistakes leaves the text right and the acceptance low, so that no other test sees it. The trace was made by
`python -m tests.golden.record`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_service.engines.dflash import model as dflash
from tests.golden.acceptance import FOLDER, PROMPT_LENGTH, acceptance_length, load_trace

EXPECTED: dict[int, float] = {
    int(budget): length for budget, length in json.loads((FOLDER / "expected.json").read_text()).items()
}
BUDGET = max(EXPECTED)
TOLERANCE = 0.03  # tokens a round: what another machine's rounding may change
LEAST_DAMAGE = 0.2  # tokens a round that every mistake costs, far above the tolerance


@pytest.mark.parametrize("budget", EXPECTED)
def test_acceptance_is_as_recorded(budget: int) -> None:
    """The drafter gains the tokens a round that it gained when the trace was made."""
    assert acceptance_length(budget) == pytest.approx(EXPECTED[budget], abs=TOLERANCE)


def test_trace_is_worth_something() -> None:
    """The texts are the target's own, the drafter is far better than none, and a larger tree better than a smaller."""
    trace = load_trace()
    chosen = trace.logits[:, PROMPT_LENGTH - 1 : -1].log_softmax(-1).gather(2, trace.token_ids[:, PROMPT_LENGTH:, None])
    assert chosen.exp().mean() > 0.5
    assert chosen.exp().min() > 0
    assert EXPECTED[BUDGET] > EXPECTED[min(EXPECTED)] > 2


def check_caught(length: float) -> None:
    """A length that the recorded one tells from what is right."""
    assert length < EXPECTED[BUDGET] - LEAST_DAMAGE


@pytest.mark.parametrize("shift", [-1, 1])
def test_tap_off_by_one_is_caught(shift: int) -> None:
    """Reading what goes into a tapped layer, or what comes out of the one behind it."""
    check_caught(acceptance_length(BUDGET, hidden_states=lambda states: torch.roll(states, -shift, dims=0)))


def test_missing_anchor_embedding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of masks alone: the bonus token's embedding is not in its first row."""

    def rows_of_masks(drafter: dflash.DFlashDrafter, bonus_ids: Tensor) -> Tensor:
        rows: Tensor = drafter.embedding[drafter.config.mask_token_id].expand(*bonus_ids.shape, drafter.config.block_size, -1)
        return rows

    monkeypatch.setattr(dflash.DFlashDrafter, "block_rows", rows_of_masks)
    check_caught(acceptance_length(BUDGET))


def test_wrong_mask_token_is_caught(tmp_path: Path) -> None:
    """A mask token that the drafter was not trained with."""
    drafter = shutil.copytree(FOLDER / "drafter", tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 50
    (drafter / "config.json").write_text(json.dumps(config))
    check_caught(acceptance_length(BUDGET, drafter=drafter))


@pytest.mark.parametrize("other", ["the embedding", "random"])
def test_unshared_head_is_caught(other: str, tmp_path: Path) -> None:
    """Logits by another matrix than the target's output head."""
    target = shutil.copytree(FOLDER / "target", tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone() if other == "the embedding" else torch.randn(97, 64)
    save_file({**tensors, "lm_head.weight": head}, target / "model.safetensors")
    check_caught(acceptance_length(BUDGET, target=target))


def shift_block(shift: int) -> Callable[[Tensor], Tensor]:
    """A block's positions, moved; committed positions, of one dimension, stay."""
    return lambda positions: positions + shift if positions.ndim > 1 else positions


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("block at 0", lambda positions: positions % 6 if positions.ndim > 1 else positions),
        ("block behind a gap", shift_block(6)),
        (
            "committed positions always from 0",
            lambda positions: positions if positions.ndim > 1 else torch.arange(len(positions)),
        ),
    ],
)
def test_wrong_positions_are_caught(name: str, positions: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions that are not those of the sequence."""
    rotate = dflash.Rotary.rotate

    def rotate_wrongly(rotary: Any, heads: Tensor, at: Tensor) -> Tensor:
        return rotate(rotary, heads, positions(at))

    monkeypatch.setattr(dflash.Rotary, "rotate", rotate_wrongly)
    check_caught(acceptance_length(BUDGET))


def test_features_of_the_wrong_positions_are_caught() -> None:
    """Each position given the features of the one before it."""
    check_caught(acceptance_length(BUDGET, hidden_states=lambda states: torch.roll(states, 1, dims=1)))


def test_taps_in_another_order_are_caught() -> None:
    """The right layers, concatenated in the wrong order."""
    check_caught(acceptance_length(BUDGET, hidden_states=lambda states: states[[0, 3, 2, 1, 4]]))
