"""This file is the stages of training between the command line and the parts: each leaves files and finds what is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from draft_service.engines.precision import mixed_precision
from training import sources
from training.batches import Captured
from training.capture import capture_shard
from training.checkpoints import WEIGHTS as CHECKPOINT_WEIGHTS
from training.checkpoints import Progress, read_progress
from training.corpus import Generation, append_generations, read_generations
from training.generation import Answering, answer
from training.learners.warm_start import likeliest_candidates
from training.recipes import Lesson, Recipe, RecurrentRecipe, Shape, make_recipe
from training.report import acceptance_lengths, ngram_length
from training.shipping import WEIGHTS as SHIPPED_WEIGHTS
from training.shipping import DataSource, Fingerprint, Story
from training.speed import Price, price
from training.target import Target
from training.trainer import CHECKPOINT
from training.workspace import Workspace
from treewire.vocabulary import load_tokenizer, vocabulary_hash
from treewire.weights import resolve

Advance = Callable[[int, int], None]  # done, of how many
PROMPT_SEED = 0


@dataclass(frozen=True)
class GenerationSettings:
    """How the corpus grows: half of the answers greedy, half sampled at `temperature`."""

    num_prompts: int = 2000
    max_new_tokens: int = 128
    temperature: float = 0.7
    batch_size: int = 64


@dataclass(frozen=True)
class CaptureSettings:
    """What is kept of the target's hidden states; no taps means four, spread over the depth of the target."""

    tapped_layers: tuple[int, ...] = ()
    shard_size: int = 128
    batch_size: int = 16
    held_out_tokens: int = 128


@dataclass(frozen=True)
class Evaluation:
    """What a finished drafter reaches on the held-out answers."""

    lengths: dict[str, float]
    ngram_length: float
    num_prompts: int
    num_tokens: int


def load_target(name: str, *, bfloat16: bool) -> Target:
    """The target of a name that `treewire.weights` knows, or of a directory."""
    return Target(resolve(name), bfloat16=bfloat16)


def tapped_layers(target: Target, settings: CaptureSettings) -> tuple[int, ...]:
    """The tapped layers: the settings', or at 7, 14, 21 and 27 thirtieths of the target's depth."""
    if settings.tapped_layers:
        return settings.tapped_layers
    depth = target.num_layers
    return tuple(sorted({min(depth - 1, max(0, round(share * depth / 30) - 1)) for share in (7, 14, 21, 27)}))


def write_prompts(workspace: Workspace, held_out: Path, num_sums: int, wordnet: Path | None) -> int:
    """Assemble the prompts of every source, shuffled, none of them held out; how many."""
    every = [*sources.instructions(), *sources.sums(num_sums), *sources.standard_library()]
    if wordnet is not None:
        every += sources.wordnet(wordnet)
    prompts = list(sources.without(every, sources.held_out(held_out)))
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(PROMPT_SEED)).tolist()
    sources.write_prompts(workspace.prompts, (prompts[index] for index in order))
    note_licences(workspace, {prompt.source: prompt.licence for prompt in prompts})
    return len(prompts)


def note_licences(workspace: Workspace, licences: dict[str, str]) -> None:
    """Remember under which licence a source's words are."""
    path = workspace.root / "licences.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    workspace.root.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**known, **licences}, indent=2))


def generate(target: Target, workspace: Workspace, settings: GenerationSettings, advance: Advance) -> None:
    """Answer the first prompts of the workspace, from where an earlier call stopped."""
    prompts = sources.read_prompts(workspace.prompts)[: settings.num_prompts]
    path = workspace.generations / "answers.jsonl"
    done = sum(1 for _ in read_generations(path)) if path.exists() else 0
    while done < len(prompts):
        batch = prompts[done : done + settings.batch_size]
        temperature = 0.0 if done // settings.batch_size % 2 else settings.temperature
        said = answer(
            target,
            [target.chat_prompt(prompt.text) for prompt in batch],
            Answering(settings.max_new_tokens, temperature, seed=done),
            "",
        )
        rows = [
            Generation(row.prompt_ids, row.output_ids, row.temperature, prompt.source)
            for row, prompt in zip(said, batch, strict=True)
        ]
        append_generations(path, rows)
        done += len(batch)
        advance(done, len(prompts))


def add_corpus(workspace: Workspace, path: Path, source: str, licence: str) -> int:
    """Take in generations of the same target from elsewhere; how many."""
    rows = [Generation(row.prompt_ids, row.output_ids, row.temperature, source) for row in read_generations(path)]
    (workspace.generations / f"{source}.jsonl").unlink(missing_ok=True)
    append_generations(workspace.generations / f"{source}.jsonl", rows)
    note_licences(workspace, {source: licence})
    return len(rows)


def add_text(target: Target, workspace: Workspace, path: Path, source: str, licence: str, length: int) -> int:
    """Take in ordinary text, cut into sequences of `length` tokens: the target's distributions over it are taught; how many."""
    token_ids = target.tokenizer(path.read_text(encoding="utf-8"))["input_ids"]
    pieces = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
    rows = [Generation(tuple(piece[:1]), tuple(piece[1:]), None, source) for piece in pieces if len(piece) > 1]
    append_generations(workspace.generations / f"{source}.jsonl", rows)
    note_licences(workspace, {source: licence})
    return len(rows)


def corpus(target: Target, workspace: Workspace, held_out: Path) -> list[Generation]:
    """Every generation of the workspace whose prompt is not held out, file after file."""
    barred = {target.chat_prompt(text) for text in sources.held_out(held_out)}
    files = sorted(path for path in workspace.generations.glob("*.jsonl*"))
    return [row for path in files for row in read_generations(path) if row.prompt_ids not in barred]


def capture_corpus(target: Target, workspace: Workspace, settings: CaptureSettings, held_out: Path, advance: Advance) -> None:
    """Capture the corpus in shards; shards that exist stay. Each file of the corpus is shuffled for itself, so it may grow."""
    taps = tapped_layers(target, settings)
    rows = corpus(target, workspace, held_out)
    starts = range(0, len(rows), settings.shard_size)
    for number, start in enumerate(starts):
        path = workspace.shards / f"{number:05d}.safetensors"
        capture_shard(target, rows[start : start + settings.shard_size], taps, path, batch_size=settings.batch_size)
        advance(number + 1, len(starts))


def capture_held_out(target: Target, workspace: Workspace, settings: CaptureSettings, held_out: Path) -> None:
    """Answer the held-out prompts greedily and capture the answers. Wants a target in float32."""
    if not workspace.held_out_generations.exists():
        prompts = [target.chat_prompt(text) for text in sources.held_out(held_out)]
        said = answer(target, prompts, Answering(settings.held_out_tokens), "held_out")
        append_generations(workspace.held_out_generations, said)
    rows = list(read_generations(workspace.held_out_generations))
    path = workspace.held_out_shards / "00000.safetensors"
    capture_shard(target, rows, tapped_layers(target, settings), path, batch_size=settings.batch_size)


def prepare(target: Target, workspace: Workspace, shape: Shape, lesson: Lesson) -> tuple[Recipe, Captured]:
    """A fresh drafter for the captured corpus, and that corpus."""
    captured = Captured(workspace.shards)
    candidate_ids = _candidates(captured, target, workspace, shape.num_candidates)
    recipe = make_recipe(target, shape, lesson, captured.tapped_layers, candidate_ids, captured.last_tap_scale())
    return recipe, captured


def _candidates(captured: Captured, target: Target, workspace: Workspace, num_candidates: int) -> Tensor:
    """The candidates, chosen once for a workspace: a run that is resumed keeps them though the corpus grew."""
    if not workspace.candidates.exists():
        chosen = likeliest_candidates(captured.token_counts(target.vocabulary_size), num_candidates)
        workspace.candidates.write_text(json.dumps(chosen.tolist()))
    return torch.tensor(json.loads(workspace.candidates.read_text()))


def adopt_candidates(workspace: Workspace, shipped: Path) -> None:
    """Let a workspace's drafters guess the tokens that a shipped drafter guesses. Raises ValueError if it guesses others."""
    token_ids = load_file(shipped / SHIPPED_WEIGHTS)["candidate_ids"].tolist()
    if workspace.candidates.exists() and json.loads(workspace.candidates.read_text()) != token_ids:
        raise ValueError(f"{shipped} guesses other tokens than {workspace.candidates} lists: take another cache directory")
    workspace.candidates.write_text(json.dumps(token_ids))


def start_from(recipe: Recipe, shipped: Path) -> None:
    """Put a shipped drafter's weights into a fresh one. Raises ValueError if their shapes differ."""
    try:
        recipe.drafter.load_state_dict(load_file(shipped / SHIPPED_WEIGHTS))
    except RuntimeError as error:
        raise ValueError(f"{shipped} has another shape than this run's drafter: {error}") from error


def restore(recipe: Recipe, run_directory: Path) -> Progress:
    """Put the weights of a run's last checkpoint into a drafter. Raises FileNotFoundError without one."""
    recipe.drafter.load_state_dict(load_file(run_directory / CHECKPOINT / CHECKPOINT_WEIGHTS))
    return read_progress(run_directory / CHECKPOINT)


def quick_lengths(recipe: Recipe, held_out: Captured, horizon: int, width: int) -> dict[str, float]:
    """Tokens a round on every fourth held-out answer, as curves show them."""
    with mixed_precision():
        return acceptance_lengths(recipe.guess(held_out.batch(held_out.keys[::4]), width, 1), horizon)


def evaluate(recipe: Recipe, workspace: Workspace, horizon: int, width: int, beam: int) -> Evaluation:
    """Tokens a round on all held-out answers; trees over marginals use the drafter's best path alone (a beam of 1)."""
    held_out = Captured(workspace.held_out_shards)
    batch = held_out.batch(held_out.keys)
    with mixed_precision():
        lengths = acceptance_lengths(recipe.guess(batch, width, 1), horizon)
        if beam > 1:
            wide = acceptance_lengths(recipe.guess(batch, width, beam), horizon)
            lengths |= {name: length for name, length in wide.items() if name.startswith("conditional")}
    rows = list(read_generations(workspace.held_out_generations))
    looked_up = ngram_length([row.prompt_ids for row in rows], [row.output_ids for row in rows], horizon)
    return Evaluation(lengths, looked_up, len(rows), sum(len(row.output_ids) for row in rows))


@dataclass(frozen=True, eq=False)
class Finished:
    """A trained drafter and what it reaches."""

    recipe: Recipe
    progress: Progress
    evaluation: Evaluation


def note_shape(run_directory: Path, shape: Shape, lesson: Lesson) -> None:
    """Remember beside a run what was chosen about its drafter."""
    run_directory.mkdir(parents=True, exist_ok=True)
    (run_directory / "shape.json").write_text(json.dumps({"shape": asdict(shape), "lesson": asdict(lesson)}, indent=2))


def finish(target: Target, workspace: Workspace, run_directory: Path, beam: int, width: int) -> Finished:
    """Evaluate a run's last checkpoint."""
    recipe, shape, progress = _noted_run(target, workspace, run_directory)
    return Finished(recipe, progress, evaluate(recipe, workspace, shape.horizon, width, beam))


def price_of(target: Target, workspace: Workspace, run_directory: Path, beam: int, width: int) -> Price:
    """What a round of a run's drafter costs. Raises ValueError for a block drafter, which is not priced."""
    recipe = _noted_run(target, workspace, run_directory).recipe
    if not isinstance(recipe, RecurrentRecipe):
        raise ValueError("only recurrent drafters are priced, this run trains another architecture")
    return price(recipe.drafter.for_drafting(), target, beam=beam, width=width)


class _NotedRun(NamedTuple):
    recipe: Recipe
    shape: Shape
    progress: Progress


def _noted_run(target: Target, workspace: Workspace, run_directory: Path) -> _NotedRun:
    """A run's drafter as of its last checkpoint."""
    noted = json.loads((run_directory / "shape.json").read_text())
    shape = Shape(**noted["shape"])
    recipe, _ = prepare(target, workspace, shape, Lesson(**noted["lesson"]))
    return _NotedRun(recipe, shape, restore(recipe, run_directory))


def tell(target_name: str, workspace: Workspace, progress: Progress, evaluation: Evaluation, notes: str) -> Story:
    """What the card says about a run."""
    directory = resolve(target_name)
    tokenizer = load_tokenizer(directory)
    licences = json.loads((workspace.root / "licences.json").read_text())
    counts: dict[str, int] = {}
    for path in sorted(workspace.generations.glob("*.jsonl*")):
        for row in read_generations(path):
            counts[row.source] = counts.get(row.source, 0) + len(row.output_ids)
    return Story(
        Fingerprint(target_name, tokenizer.get_vocab_size(), vocabulary_hash(tokenizer)),
        tuple(DataSource(name, licences.get(name, "unknown"), count) for name, count in sorted(counts.items())),
        Captured(workspace.shards).num_tokens,
        progress,
        evaluation.num_prompts,
        evaluation.num_tokens,
        evaluation.lengths,
        evaluation.ngram_length,
        notes,
    )
