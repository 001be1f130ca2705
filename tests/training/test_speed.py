"""What makes a draft cheap, and how its price is taken."""

from __future__ import annotations

import pytest
import torch

from draft_service.engines.weight_only import INT8_MAX_ROWS, RowLinear, WeightOnlyLinear
from tests.training.conftest import fresh_recipe
from training.recipes import RecurrentRecipe
from training.speed import price
from training.target import Target
from training.workspace import Workspace


@pytest.mark.parametrize("kind", [WeightOnlyLinear, RowLinear])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 96), (30, 50)])
def test_int8_weights_stay_within_their_rounding(
    inputs: int, outputs: int, kind: type[WeightOnlyLinear] | type[RowLinear]
) -> None:
    """Few rows, many rows and odd shapes all give what the weights give, to the precision of rounding, by either kernel."""
    torch.manual_seed(0)
    weight, rows = torch.randn(outputs, inputs), torch.randn(INT8_MAX_ROWS + 4, inputs)
    linear = kind(weight)
    expected = rows @ weight.T
    tolerance = 0.02 * float(expected.abs().max())
    for count in (1, INT8_MAX_ROWS, INT8_MAX_ROWS + 4):
        torch.testing.assert_close(linear(rows[:count]), expected[:count], atol=tolerance, rtol=0.0)
    assert linear(rows.reshape(2, -1, inputs)).shape == (2, len(rows) // 2, outputs)


def test_a_price_is_a_share_of_a_target_step(target: Target, workspace: Workspace) -> None:
    """Both medians are times, and the share is their ratio."""
    recipe = fresh_recipe(target, workspace)
    assert isinstance(recipe, RecurrentRecipe)
    paid = price(recipe.drafter.for_drafting(), target, beam=2, width=4, context=16, num_rounds=3)
    assert paid.draft_ms > 0
    assert paid.target_ms > 0
    assert paid.share == paid.draft_ms / paid.target_ms
