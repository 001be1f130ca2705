"""This file is the target as training sees it: a transformers model that gives hidden states, and its chat template."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from draft_service.engines.precision import bfloat16_pays

RMS_EPSILON = 1e-6


class HiddenStates(NamedTuple):
    """What a forward leaves for training, of [batch, positions].

    `taps` [batch, positions, taps, hidden] are the outputs of the tapped layers, each divided by its root mean square,
    `scales` [batch, positions, taps] those root mean squares; `final` [batch, positions, hidden] is what the output head reads.
    """

    taps: Tensor
    scales: Tensor
    final: Tensor


class Target:
    """A causal language model of transformers, read only. `bfloat16` runs its matrix products in that precision."""

    def __init__(self, directory: Path, *, bfloat16: bool) -> None:
        self._bfloat16 = bfloat16
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.requires_grad_(False)
        self.tokenizer = AutoTokenizer.from_pretrained(directory)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the output head."""
        return int(self.model.config.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return int(self.model.config.hidden_size)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.model.config.num_hidden_layers)

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        end = self.model.generation_config.eos_token_id if self.model.generation_config else self.model.config.eos_token_id
        return tuple(end) if isinstance(end, list) else (int(end),)

    @property
    def embedding(self) -> Tensor:
        """Input embedding, float32 [vocabulary, hidden]."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight.detach()

    @property
    def head(self) -> Tensor:
        """Output head, float32 [vocabulary, hidden]."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight.detach()

    def precision(self) -> AbstractContextManager[object]:
        """The context in which the model's forward runs."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16 and bfloat16_pays())

    def chat_prompt(self, question: str) -> tuple[int, ...]:
        """Token ids of a question as a user's turn, ready for the answer. A model without a chat template gets plain text."""
        if self.tokenizer.chat_template is None:
            return tuple(self.tokenizer(question)["input_ids"])
        text = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def hidden_states(self, token_ids: Tensor, tapped_layers: Sequence[int]) -> HiddenStates:
        """One forward over int64 [batch, positions], padded on the right (a causal model never looks there)."""
        with self.precision():
            states = self.model.base_model(input_ids=token_ids, use_cache=False, output_hidden_states=True).hidden_states
        taps = torch.stack([states[layer + 1].float() for layer in tapped_layers], dim=2)
        scales = taps.square().mean(-1).add(RMS_EPSILON).sqrt()
        return HiddenStates(taps / scales.unsqueeze(-1), scales, states[-1].float())
