"""Where drafters, and their training, compute in bfloat16."""

from __future__ import annotations

import pytest
import torch

from draft_service.engines.precision import bfloat16_pays, mixed_precision, product_dtype


@pytest.mark.parametrize(("avx512", "amx"), [(False, False), (True, False), (False, True)])
def test_products_are_in_bfloat16_only_where_the_cpu_has_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, amx: bool
) -> None:
    """Emulated bfloat16 is several times slower than float32, so a CPU without either set of instructions gets float32."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert bfloat16_pays() == (avx512 or amx)
    assert product_dtype() == (torch.bfloat16 if avx512 or amx else torch.float32)
    with mixed_precision():
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if avx512 or amx else torch.float32)
