"""This file is the entry of training: `python -m training all` goes from prompts to a shipped drafter, stage by stage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from training import stages
from training.batches import Captured
from training.checkpoints import Progress as RunProgress
from training.recipes import Lesson, Recipe, Shape
from training.shipping import ship
from training.target import Target
from training.trainer import Reporting, Run, Schedule, train
from training.workspace import HELD_OUT_PROMPTS, Workspace

app = typer.Typer(help="Train a drafter for a target, stage by stage, or all of them.", no_args_is_help=True)
console = Console()

TargetName = Annotated[str, typer.Option("--target", help="Packaged model, hub id or directory.")]
CacheDir = Annotated[Path | None, typer.Option("--cache-dir", help="Where everything but the shipped drafter is kept.")]
HeldOut = Annotated[Path, typer.Option("--held-out", help="Prompts that no drafter may learn from, one a line.")]
RunName = Annotated[str, typer.Option("--run", help="Name of the training run.")]
Threads = Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")]
Exact = Annotated[bool, typer.Option("--float32", help="Run the target in float32 even where bfloat16 is faster.")]
Taps = Annotated[str, typer.Option("--taps", help="Tapped layers of the target, separated by commas; empty for four.")]
NumPrompts = Annotated[int, typer.Option("--num-prompts", min=1, help="Prompts to answer.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=2, help="Longest answer.")]
HeldOutTokens = Annotated[int, typer.Option("--held-out-tokens", min=2, help="Longest held-out answer.")]
Architecture = Annotated[str, typer.Option("--architecture", help="recurrent or dflash.")]
Horizon = Annotated[int, typer.Option("--horizon", min=1, help="Guesses deep.")]
Candidates = Annotated[int, typer.Option("--candidates", min=1, help="Tokens that a drafter can guess.")]
Depth = Annotated[int, typer.Option("--depth", min=1, help="Guesses deep that a recurrent drafter is taught.")]
Starts = Annotated[int, typer.Option("--starts", min=1, help="Chains or blocks in each sequence.")]
MaskToken = Annotated[int, typer.Option("--mask-token", min=0, help="Token that stands for a guess in a dflash block.")]
NumSteps = Annotated[int, typer.Option("--steps", min=1, help="Optimizer steps, those before a resume included.")]
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Sequences a step.")]
Rate = Annotated[float, typer.Option("--learning-rate", help="Highest learning rate.")]
DecayShare = Annotated[
    float, typer.Option("--decay-share", min=0.0, max=1.0, help="Share of the steps over which the rate falls.")
]
EvaluateEvery = Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")]
Beam = Annotated[int, typer.Option("--beam", min=1, help="Prefixes expanded at each depth for conditional trees.")]
Width = Annotated[int, typer.Option("--width", min=1, help="Tokens a guess names.")]
StartFrom = Annotated[
    Path | None, typer.Option("--start-from", help="A shipped recurrent drafter whose weights a new run starts from.")
]
Output = Annotated[Path, typer.Option("--output", help="Directory of the shipped drafter.")]
Notes = Annotated[str, typer.Option("--notes", help="Limits, in words, for the card.")]

DEFAULT_TARGET = "smollm2-135m"


@app.command()
def prompts(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    held_out: HeldOut = HELD_OUT_PROMPTS,
    num_sums: Annotated[int, typer.Option("--num-sums", min=0, help="Calculations in words.")] = 400,
    wordnet: Annotated[Path | None, typer.Option("--wordnet", help="WordNet's data.noun.")] = None,
) -> None:
    """Assemble prompts of every source, with their licences."""
    count = stages.write_prompts(_workspace(target, cache_dir), held_out, num_sums, wordnet)
    console.print(f"{count:,} prompts")


@app.command()
def add_corpus(path: Path, source: str, licence: str, target: TargetName = DEFAULT_TARGET, cache_dir: CacheDir = None) -> None:
    """Take in generations of the same target from a .jsonl or .jsonl.gz file."""
    console.print(f"{stages.add_corpus(_workspace(target, cache_dir), path, source, licence):,} generations")


@app.command()
def add_text(
    path: Path,
    source: str,
    licence: str,
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a sequence.")] = 160,
) -> None:
    """Take in a file of ordinary text."""
    model = stages.load_target(target, bfloat16=True)
    count = stages.add_text(model, _workspace(target, cache_dir), path, source, licence, length)
    console.print(f"{count:,} sequences")


@app.command()
def generate(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    num_prompts: NumPrompts = 2000,
    max_new_tokens: MaxNewTokens = 128,
    threads: Threads = 1,
    float32: Exact = False,
) -> None:
    """Let the target answer the prompts, in batches."""
    torch.set_num_threads(threads)
    model = stages.load_target(target, bfloat16=not float32)
    settings = stages.GenerationSettings(num_prompts, max_new_tokens)
    with _bar("answers") as advance:
        stages.generate(model, _workspace(target, cache_dir), settings, advance)


@app.command()
def capture(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    held_out: HeldOut = HELD_OUT_PROMPTS,
    taps: Taps = "",
    held_out_tokens: HeldOutTokens = 128,
    threads: Threads = 1,
    float32: Exact = False,
) -> None:
    """Keep the target's hidden states over its answers, and over its greedy answers to the held-out prompts."""
    torch.set_num_threads(threads)
    tapped = tuple(int(layer) for layer in taps.split(",")) if taps else ()
    settings, workspace = stages.CaptureSettings(tapped, held_out_tokens=held_out_tokens), _workspace(target, cache_dir)
    console.print("held-out prompts")
    stages.capture_held_out(stages.load_target(target, bfloat16=False), workspace, settings, held_out)
    with _bar("shards") as advance:
        stages.capture_corpus(stages.load_target(target, bfloat16=not float32), workspace, settings, held_out, advance)


@app.command(name="train")
def train_drafter(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    run: RunName = "drafter",
    architecture: Architecture = "recurrent",
    horizon: Horizon = 6,
    candidates: Candidates = 8192,
    depth: Depth = 4,
    starts: Starts = 48,
    mask_token: MaskToken = 0,
    steps: NumSteps = 2000,
    batch_size: BatchSize = 8,
    learning_rate: Rate = 1.5e-3,
    decay_share: DecayShare = 0.4,
    evaluate_every: EvaluateEvery = 250,
    width: Width = 16,
    start_from: StartFrom = None,
    threads: Threads = 1,
) -> None:
    """Train, from the run's last checkpoint if it has one."""
    torch.set_num_threads(threads)
    workspace, model = _workspace(target, cache_dir), stages.load_target(target, bfloat16=True)
    shape, lesson = Shape(architecture, horizon, candidates, mask_token_id=mask_token), Lesson(depth, starts)
    recipe, captured = _prepared(model, workspace, shape, lesson, start_from)
    held_out = Captured(workspace.held_out_shards)
    schedule = Schedule(steps, batch_size, learning_rate, decay_share=decay_share)
    training = Run(
        recipe.drafter,
        recipe.learn,
        lambda: stages.quick_lengths(recipe, held_out, horizon, width),
        captured,
        schedule,
        Reporting(evaluate_every=evaluate_every),
        workspace.run(run),
    )
    console.print(f"{captured.num_tokens:,} positions, {len(captured.keys):,} sequences")
    stages.note_shape(workspace.run(run), shape, lesson)
    with _bar("steps") as advance:
        train(training, lambda progress: _report(progress, steps, advance))


@app.command()
def evaluate(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    run: RunName = "drafter",
    beam: Beam = 4,
    width: Width = 16,
    threads: Threads = 1,
) -> None:
    """Tokens a round on all held-out answers."""
    torch.set_num_threads(threads)
    evaluated = _evaluated(target, _workspace(target, cache_dir), run, beam, width)
    console.print_json(data=asdict(evaluated.evaluation))


@app.command()
def price(
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    run: RunName = "drafter",
    beam: Beam = 4,
    width: Width = 16,
    threads: Threads = 1,
) -> None:
    """One draft round's cost against a one-token step of the target in float32; for recurrent drafters."""
    torch.set_num_threads(threads)
    workspace, model = _workspace(target, cache_dir), stages.load_target(target, bfloat16=False)
    console.print_json(data=asdict(stages.price_of(model, workspace, workspace.run(run), beam, width)))


@app.command()
def card(
    output: Output,
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    run: RunName = "drafter",
    notes: Notes = "None noted.",
    beam: Beam = 4,
    width: Width = 16,
    threads: Threads = 1,
) -> None:
    """Write the drafter's directory: weights, shape, card, curves, checksums."""
    torch.set_num_threads(threads)
    workspace = _workspace(target, cache_dir)
    evaluated = _evaluated(target, workspace, run, beam, width)
    story = stages.tell(target, workspace, evaluated.progress, evaluated.evaluation, notes)
    ship(output, evaluated.recipe.drafter, evaluated.recipe.config(), story)
    console.print(f"{output}: {sum(path.stat().st_size for path in output.iterdir()) / 1e6:.1f} MB")


@app.command(name="all")
def every_stage(
    output: Output,
    target: TargetName = DEFAULT_TARGET,
    cache_dir: CacheDir = None,
    held_out: HeldOut = HELD_OUT_PROMPTS,
    run: RunName = "drafter",
    architecture: Architecture = "recurrent",
    taps: Taps = "",
    num_prompts: NumPrompts = 2000,
    max_new_tokens: MaxNewTokens = 128,
    held_out_tokens: HeldOutTokens = 128,
    horizon: Horizon = 6,
    candidates: Candidates = 8192,
    starts: Starts = 48,
    steps: NumSteps = 2000,
    batch_size: BatchSize = 8,
    threads: Threads = 1,
    float32: Exact = False,
) -> None:
    """Every stage, each from where it stopped."""
    prompts(target, cache_dir, held_out)
    generate(target, cache_dir, num_prompts, max_new_tokens, threads, float32)
    capture(target, cache_dir, held_out, taps, held_out_tokens, threads, float32)
    train_drafter(
        target,
        cache_dir,
        run,
        architecture,
        horizon,
        candidates,
        starts=starts,
        steps=steps,
        batch_size=batch_size,
        threads=threads,
    )
    card(output, target, cache_dir, run, threads=threads)


def _prepared(
    model: Target, workspace: Workspace, shape: Shape, lesson: Lesson, start_from: Path | None
) -> tuple[Recipe, Captured]:
    if start_from is None:
        return stages.prepare(model, workspace, shape, lesson)
    try:
        stages.adopt_candidates(workspace, start_from)
        prepared = stages.prepare(model, workspace, shape, lesson)
        stages.start_from(prepared[0], start_from)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--start-from") from error
    return prepared


def _evaluated(target: str, workspace: Workspace, run: str, beam: int, width: int) -> stages.Finished:
    return stages.finish(stages.load_target(target, bfloat16=True), workspace, workspace.run(run), beam, width)


def _workspace(target: str, cache_dir: Path | None) -> Workspace:
    return Workspace(cache_dir) if cache_dir is not None else Workspace.default(target)


def _report(progress: RunProgress, num_steps: int, advance: stages.Advance) -> None:
    step, loss, agreement = progress.losses[-1]
    shares = " ".join(f"{share:.2f}" for share in agreement)
    console.print(f"step {step:>6}  {progress.minutes:6.1f} CPU min  loss {loss:7.3f}  agreement {shares}", highlight=False)
    if progress.evaluations and progress.evaluations[-1].step == step:
        lengths = progress.evaluations[-1].lengths
        console.print("  ".join(f"{name} {length:.3f}" for name, length in lengths.items()), highlight=False)
    advance(step, num_steps)


@contextmanager
def _bar(label: str) -> Iterator[stages.Advance]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


if __name__ == "__main__":
    app()
