"""Tiny targets with random weights, for training in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from training import stages
from training.corpus import Generation, append_generations
from training.generation import Answering, answer
from training.recipes import Lesson, Recipe, Shape
from training.target import Target
from training.workspace import Workspace
from treewire.vocabulary import SIMULATED_END_TOKEN_ID, simulated_tokenizer

VOCABULARY_SIZE = 320
TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|turn|>{% endfor %}"
HELD_OUT = ("what is a held out prompt?", "say something else.")


@pytest.fixture(scope="session")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of three layers with random weights, and a byte tokenizer."""
    directory = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=SIMULATED_END_TOKEN_ID,
        pad_token_id=SIMULATED_END_TOKEN_ID,
        bos_token_id=0,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=simulated_tokenizer(VOCABULARY_SIZE), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def target(target_directory: Path) -> Target:
    """That target in float32."""
    return Target(target_directory, bfloat16=False)


@pytest.fixture(scope="session")
def held_out_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two held-out prompts."""
    path = tmp_path_factory.mktemp("prompts") / "held_out.txt"
    path.write_text("\n".join(HELD_OUT))
    return path


@pytest.fixture(scope="session")
def workspace(target: Target, held_out_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A workspace with sixteen answers and the held-out ones, captured."""
    workspace = Workspace(tmp_path_factory.mktemp("workspace"))
    prompts = [target.chat_prompt(f"prompt number {number}") for number in range(16)]
    append_generations(workspace.generations / "answers.jsonl", answer(target, prompts, Answering(20, 1.0), "numbers"))
    barred = Generation(target.chat_prompt(HELD_OUT[0]), (5, 6, 7))
    append_generations(workspace.generations / "answers.jsonl", [barred])
    settings = stages.CaptureSettings(shard_size=8, batch_size=4, held_out_tokens=16)
    stages.capture_held_out(target, workspace, settings, held_out_file)
    stages.capture_corpus(target, workspace, settings, held_out_file, lambda done, total: None)
    return workspace


def fresh_recipe(target: Target, workspace: Workspace, architecture: str = "recurrent") -> Recipe:
    """A new drafter on the tiny target."""
    shape = Shape(architecture, horizon=3, num_candidates=200, num_layers=2, mask_token_id=1)
    recipe, _ = stages.prepare(target, workspace, shape, Lesson(depth=3, starts=6, hard_share=1.0))
    return recipe
