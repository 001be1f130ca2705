"""This file is the public reference of DFlash, installed apart by `make conformance-reference`, and what it computes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

FOLDER = Path(__file__).parents[2] / ".venv-conformance"


def reference() -> ModuleType:
    """The module `dflash.model` of the package dflash."""
    if not (FOLDER / "dflash").is_dir():
        raise FileNotFoundError(f"{FOLDER} has no dflash: run `make conformance-reference`")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return importlib.import_module("dflash.model")


class Reference:
    """A drafter of the reference with random weights, over a random embedding and output head of its own."""

    def __init__(self, seed: int = 0, heads_have_norms: bool = True, vocabulary_size: int = 151, **shape: Any) -> None:
        torch.manual_seed(seed)
        self.config = Qwen3Config(vocab_size=vocabulary_size, **shape)
        self.model = reference().DFlashDraftModel(self.config).eval()
        for parameter in self.model.parameters():
            nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else nn.init.normal_(parameter, mean=1.0, std=0.2)
        if not heads_have_norms:  # what Llama's layers do: the reference with its head norms taken out
            for layer in self.model.layers:
                layer.self_attn.q_norm = layer.self_attn.k_norm = nn.Identity()
        self.embedding = torch.randn(vocabulary_size, self.config.hidden_size)
        self.head = torch.randn(vocabulary_size, self.config.hidden_size)
        self._cache = reference()._make_cache(self.config)
        self._length = 0

    @torch.inference_mode()
    def logits(self, taps: Tensor, bonus_id: int) -> Tensor:
        """One round: taps [n, T x H] of the newly committed positions; logits [block - 1, vocabulary] after the bonus token."""
        block = self.model.block_size
        token_ids = torch.tensor([[bonus_id] + [self.model.mask_token_id] * (block - 1)])
        embedding_scale = float(reference()._draft_value(self.config, "input_embedding_scale", 1.0))
        hidden = self.model(
            target_hidden=taps[None],
            noise_embedding=self.embedding[token_ids] * embedding_scale,
            position_ids=torch.arange(self._length, self._length + len(taps) + block)[None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._length += len(taps)
        reference()._crop_to(self._cache, self._length)
        logits: Tensor = self.model.compute_logits(hidden[:, 1 - block :], lambda rows: rows @ self.head.T)[0]
        return logits
