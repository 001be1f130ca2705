"""The stages of training, on a tiny target with random weights."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draft_service.engines.dflash.model import DFlashConfig, DFlashDrafter
from draft_service.engines.recurrent.model import RecurrentConfig, RecurrentDrafter
from tests.training.conftest import HELD_OUT, VOCABULARY_SIZE, fresh_recipe
from training import sources, stages
from training.__main__ import app
from training.batches import Captured
from training.corpus import read_generations
from training.target import Target
from training.workspace import HELD_OUT_PROMPTS, Workspace


@pytest.mark.parametrize("architecture", ["recurrent", "dflash"])
def test_one_command_goes_from_prompts_to_a_shipped_drafter(
    architecture: str, target_directory: Path, target: Target, held_out_file: Path, tmp_path: Path
) -> None:
    """`all` leaves a directory that loads, whose checksums hold and whose card has the acceptance; called again it goes on."""
    output, cache = tmp_path / "drafter", tmp_path / "cache"
    places = f"--output {output} --target {target_directory} --cache-dir {cache} --held-out {held_out_file}"
    lengths = "--max-new-tokens 12 --held-out-tokens 10 --horizon 3 --starts 4 --float32"
    counts = f"--num-prompts 12 --candidates 64 --steps 6 --batch-size 4 --architecture {architecture}"
    arguments = ["all", *places.split(), *lengths.split(), *counts.split()]
    for _ in range(2):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    for line in (output / "SHA256SUMS").read_text().splitlines():
        expected, name = line.split("  ")
        assert hashlib.sha256((output / name).read_bytes()).hexdigest() == expected
    config, tensors = json.loads((output / "config.json").read_text()), load_file(output / "model.safetensors")
    assert config["target"]["vocabulary_size"] == VOCABULARY_SIZE
    drafter: RecurrentDrafter | DFlashDrafter
    if architecture == "recurrent":
        shape = RecurrentConfig.from_json(config)
        drafter = RecurrentDrafter(shape, target.embedding, target.head, tensors["candidate_ids"].long())
    else:
        drafter = DFlashDrafter(DFlashConfig.from_json(config), target.embedding, target.head)
    drafter.load_state_dict(tensors)
    card = (output / "README.md").read_text()
    assert "2 held-out chat prompts" in card
    assert "Apache-2.0" in card
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_starts_from_a_shipped_drafter(target: Target, workspace: Workspace, tmp_path: Path) -> None:
    """A fresh drafter takes a shipped one's weights; other candidates or another shape are refused."""
    shipped, recipe = tmp_path / "shipped", fresh_recipe(target, workspace)
    with torch.no_grad():
        recipe.drafter.get_parameter("fuse.weight").add_(0.25)
    shipped.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in recipe.drafter.state_dict().items()}, shipped / "model.safetensors"
    )
    again = fresh_recipe(target, workspace)
    stages.adopt_candidates(workspace, shipped)
    stages.start_from(again, shipped)
    assert torch.equal(again.drafter.get_parameter("fuse.weight"), recipe.drafter.get_parameter("fuse.weight"))
    save_file({"candidate_ids": torch.arange(200) + 1}, shipped / "model.safetensors")
    with pytest.raises(ValueError, match="guesses other tokens"):
        stages.adopt_candidates(workspace, shipped)
    with pytest.raises(ValueError, match="another shape"):
        stages.start_from(again, shipped)


def test_held_out_prompts_are_never_learnt_from(target: Target, workspace: Workspace, held_out_file: Path) -> None:
    """An answer to a held-out prompt in the corpus is left out of what is captured."""
    barred = target.chat_prompt(HELD_OUT[0])
    assert any(row.prompt_ids == barred for row in read_generations(workspace.generations / "answers.jsonl"))
    captured = Captured(workspace.shards)
    batch = captured.batch(captured.keys)
    prompts = {tuple(row[: int(length)].tolist()) for row, length in zip(batch.token_ids, batch.prompt_lengths, strict=True)}
    assert len(captured.keys) == 16
    assert barred not in prompts


def test_prompts_equal_to_a_held_out_one_up_to_punctuation_are_dropped() -> None:
    """Case, spaces and punctuation make no difference, and every prompt comes once."""
    texts = ["What is REST", "what is rest?", "Why do cats purr", "Another"]
    kept = sources.without([sources.Prompt(text, "test", "none") for text in texts], ["why do cats purr?"])
    assert [prompt.text for prompt in kept] == ["What is REST", "Another"]


def test_the_prompts_that_come_with_treewire_are_apart() -> None:
    """At least fifty held-out prompts, none of them among the assembled ones; every prompt has a licence."""
    held_out = sources.held_out(HELD_OUT_PROMPTS)
    every = [*sources.instructions(), *sources.sums(100)]
    assert len(held_out) >= 50
    assert len(list(sources.without(every, held_out))) == len(list(sources.without(every, [])))
    assert all(prompt.licence for prompt in every)


def test_wordnet_nouns_become_prompts(tmp_path: Path) -> None:
    """A noun with its gloss is read out of WordNet's own format; other lines are not."""
    path = tmp_path / "data.noun"
    path.write_text('  1 licence text\n00021265 03 n 02 food 0 nutrient 0 001 @ 00019613 n 0000 | any substance; "food"\n')
    assert [prompt.text for prompt in sources.wordnet(path)] == ["Tell me about food, in the sense of any substance."]


def test_ordinary_text_joins_the_corpus(target: Target, tmp_path: Path) -> None:
    """Text is cut into sequences of which all but the first token are learnt from, and its licence is noted."""
    workspace, text = Workspace(tmp_path / "workspace"), tmp_path / "book.txt"
    text.write_text("Call me what you like, as long as it is in bytes.")
    count = stages.add_text(target, workspace, text, "book", "CC0-1.0", length=10)
    rows = list(read_generations(workspace.generations / "book.jsonl"))
    assert count == len(rows) > 1
    assert {len(row.prompt_ids) for row in rows} == {1}
    assert json.loads((workspace.root / "licences.json").read_text()) == {"book": "CC0-1.0"}
