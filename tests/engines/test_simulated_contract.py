"""The simulated target keeps the contract of target engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.engines.target_contract import MAX_CONTEXT, MAX_TREE_NODES, Subject, TargetContract
from treewire.core.simulated import Prefix, SimulatedModel
from verify_service.engines.simulated import SimulatedTarget


class TestSimulatedTarget(TargetContract):
    """The contract, with the model itself as the oracle."""

    @pytest.fixture
    def subject(self) -> Subject:
        """The simulated target of the contract's sizes."""
        model = SimulatedModel(seed=1)

        def next_token_id(token_ids: Sequence[int]) -> int:
            return int(model.logits([Prefix.of(token_ids)])[0].argmax())

        return Subject(lambda: SimulatedTarget(model, MAX_TREE_NODES, MAX_CONTEXT, kv_tokens=1024), next_token_id)
