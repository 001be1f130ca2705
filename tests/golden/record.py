"""This file makes the golden trace: a tiny target and a tiny block drafter, both trained here, and what the target computed.

Run `python -m tests.golden.record` to make it anew, which takes a few minutes; the expected numbers then change, and with them
what the drafter is: a new trace is for a new format, never for a test that fails.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from draft_service.engines.dflash.model import DFlashConfig, DFlashDrafter
from tests.engines.tiny_drafters import dflash_config, save_checkpoint
from tests.engines.tiny_models import VOCABULARY_SIZE, tiny_model
from tests.golden.acceptance import FOLDER, acceptance_length
from training.batches import Batch
from training.learners.dflash import block_outputs

NUM_WORDS, NUM_LAYERS, TAPS = 24, 4, [0, 1, 2]
LENGTH, NUM_TRACES, PROMPT_LENGTH = 96, 8, 8
TARGET_STEPS, DRAFTER_STEPS, BATCH_SIZE, BLOCKS = 700, 900, 16, 8
FIRST_TOKEN = 8  # those below are special
BUDGETS = (4, 16)


def main() -> None:
    """Train, record, and note what the drafter reaches on the trace."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    language = Language(random.Random(0))
    target = tiny_model("llama", num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False)
    train_target(target, language)
    config = dflash_config(dflash_config={"mask_token_id": 3, "target_layer_ids": TAPS})
    drafter = DFlashDrafter(
        DFlashConfig.from_json(config),
        target.get_input_embeddings().weight.detach(),
        target.get_output_embeddings().weight.detach(),
    )
    train_drafter(drafter, target, language)
    save_checkpoint(FOLDER / "drafter", config, {name: tensor.half() for name, tensor in drafter.state_dict().items()})
    shared = {"model.embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    save_checkpoint(FOLDER / "target", {"max_position_embeddings": 256, "tie_word_embeddings": False}, shared)
    record(target, language)
    lengths = {str(budget): acceptance_length(budget) for budget in BUDGETS}
    (FOLDER / "expected.json").write_text(json.dumps(lengths, indent=1) + "\n")
    print(lengths)


class Language:
    """Words of several tokens; after each word one of three others comes, mostly the first of them."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        tokens = range(FIRST_TOKEN, VOCABULARY_SIZE)
        self._words = [[rng.choice(tokens) for _ in range(rng.randint(3, 7))] for _ in range(NUM_WORDS)]
        self._followers = [rng.sample(range(NUM_WORDS), 3) for _ in range(NUM_WORDS)]

    def sample(self, count: int) -> Tensor:
        """Texts int64 [count, LENGTH]."""
        return torch.tensor([self._text() for _ in range(count)])

    def _text(self) -> list[int]:
        text: list[int] = []
        word = self._rng.randrange(NUM_WORDS)
        while len(text) < LENGTH:
            text += self._words[word]
            (word,) = self._rng.choices(self._followers[word], weights=(6, 3, 1))
        return text[:LENGTH]


def train_target(target: PreTrainedModel, language: Language) -> None:
    """Teach the target the language."""
    target.train()
    optimizer = torch.optim.AdamW(target.parameters(), lr=2e-3)
    for step in range(TARGET_STEPS):
        text = language.sample(BATCH_SIZE)
        logits = target(input_ids=text, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), text[:, 1:].flatten())
        _step(optimizer, loss, step, "target")
    target.eval()


def train_drafter(drafter: DFlashDrafter, target: PreTrainedModel, language: Language) -> None:
    """Teach the drafter what the target's texts go on like, in blocks at random places."""
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=2e-3)
    block = drafter.config.block_size
    for step in range(DRAFTER_STEPS):
        text = language.sample(BATCH_SIZE)
        anchors = torch.randint(1, LENGTH - block, (BATCH_SIZE, BLOCKS))
        outputs = block_outputs(drafter, _batch(text, _hidden_states(target, text)), anchors)
        wanted = text.gather(1, (anchors[..., None] + torch.arange(1, block)).flatten(1))
        logits = drafter.logits(outputs[:, :, 1:])
        _step(optimizer, functional.cross_entropy(logits.flatten(0, 2), wanted.flatten()), step, "drafter")


def record(target: PreTrainedModel, language: Language) -> None:
    """Write texts of the target's own, drawn at temperature 1, with its logits and every layer's output, in float16."""
    text = language.sample(NUM_TRACES)[:, :PROMPT_LENGTH]
    generator = torch.Generator().manual_seed(1)
    while text.shape[1] < LENGTH:
        with torch.inference_mode():
            law = target(input_ids=text, use_cache=False).logits[:, -1].softmax(-1)
        text = torch.cat([text, torch.multinomial(law, 1, generator=generator)], dim=1)
    with torch.inference_mode():
        output = target(input_ids=text, use_cache=False, output_hidden_states=True)
    trace = {
        "token_ids": text.int(),
        "logits": output.logits.half(),
        "hidden_states": torch.stack(output.hidden_states, dim=1).half(),
    }
    save_file({name: tensor.contiguous() for name, tensor in trace.items()}, FOLDER / "trace.safetensors")


@torch.inference_mode()
def _hidden_states(target: PreTrainedModel, text: Tensor) -> Sequence[Tensor]:
    states: Sequence[Tensor] = target(input_ids=text, use_cache=False, output_hidden_states=True).hidden_states
    return states


def _batch(text: Tensor, hidden_states: Sequence[Tensor]) -> Batch:
    taps = torch.stack([hidden_states[layer + 1] for layer in TAPS], dim=2).clone()
    lengths = torch.full((len(text),), LENGTH)
    return Batch(text, taps, hidden_states[-1].clone(), torch.ones_like(lengths), lengths)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor, step: int, name: str) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(f"{name} {step}: {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
