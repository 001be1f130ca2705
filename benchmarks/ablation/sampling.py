"""This file is the ablation of tree building and acceptance under sampling, on the real model: tokens gained a round.

    python -m benchmarks.ablation.sampling [--drafter ngram] [--num-prompts 30] [--max-tokens 48] [--output-stem PATH]

Rules: *plain tree* (ranked by log-prob, the noise unknown to the drafter), *shared noise* with the default weights, the same
with weights calibrated on other prompts, and *hybrid rejection*. No rule needs a forward over its trees here: with shared noise
the output is the same whatever the trees, so that one generation for each prompt and temperature serves all of them; and a walk
of hybrid acceptance only ever consults the target behind tokens that are committed. So all sequences grow a token a step, in
large batches, and the trees are walked along them: the figures are those of the real rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from benchmarks.ablation.engines import load_drafter, load_target, tokenization_of
from draft_service.engine import DraftEngine, Proposal
from treewire.core.acceptance import Acceptance
from treewire.core.build import BuiltTree, build_tree, perturb
from treewire.core.calibration import Weights, choices_of_round, fit
from treewire.core.hybrid import accept_hybrid, build_hybrid_tree
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, DraftTree, Marginals
from verify_service.engine import Posterior, PrefillChunk, Scoring, TargetEngine

PROMPTS = Path(__file__).with_name("prompts.txt")
RESULTS = Path(__file__).parents[1] / "results" / "ablation_sampling"
NUM_CALIBRATION_PROMPTS = 10
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
SHAPES = {"chain": (8, 1), "B = 8": (8, 16), "B = 16": (16, 16), "B = 64": (64, 32)}  # budget, width of the marginals
HYBRID_WIDTHS = {"chain": 1, "B = 8": 3, "B = 16": 3, "B = 64": 4}
RECORDING_BUDGET = 64
MAX_BATCH_SIZE = 64
DEFAULT_WEIGHTS = Weights(0.7, 0.5)
_session_ids = itertools.count(1)


class Builder(Protocol):
    """How one rule builds its tree."""

    def __call__(self, root: int, marginals: Marginals, root_position: int) -> BuiltTree: ...


@dataclass(frozen=True)
class Shape:
    """A budget, and how many tokens a depth trees choose from."""

    name: str
    budget: int
    width: int


@dataclass(frozen=True)
class Cell:
    """One figure of the table: tokens gained a round, over all prompts."""

    rule: str
    shape: str
    temperature: float
    num_tokens: int
    num_rounds: int
    num_draft_tokens: int

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the prefill's one left out."""
        return self.num_tokens / self.num_rounds


class Rounds:
    """The rounds of one generation with its own drafter session: trees are built as commits come, and counted."""

    def __init__(self, drafter: DraftEngine, prompt: Sequence[int], sampling: Sampling, width: int, build: Builder) -> None:
        self._drafter, self._width, self._build = drafter, width, build
        self._session = next(_session_ids)
        self._length = len(prompt)
        self._uncommitted: list[int] = []
        drafter.start(self._session, prompt, sampling)
        self.built: BuiltTree | None = None
        self.node = 0
        self.num_rounds = 0
        self.num_draft_tokens = 0
        self.num_tokens = 0

    def take(self, token_id: int) -> None:
        """The next token of the sequence: goes on in the tree where that has it, else it is the bonus and ends the round."""
        self._uncommitted.append(token_id)
        if self.built is not None:
            self.num_tokens += 1
            tree = self.built.tree
            child = next((child for child in tree.children[self.node] if tree.token_ids[child] == token_id), None)
            if child is not None:
                self.node = child
                return
        self._next_round()

    def close(self) -> None:
        """End the drafter's session."""
        self._drafter.release(self._session)

    def _next_round(self) -> None:
        self._length += len(self._uncommitted)
        commit = Commit(tuple(self._uncommitted), self._length)
        horizon = self._drafter.drafter.horizon
        (marginals,) = self._drafter.propose([Proposal(self._session, commit, horizon, self._width)])
        self.built, self.node = self._build(commit.bonus_token_id, marginals, self._length - 1), 0
        self.num_rounds += 1
        self.num_draft_tokens += self.built.tree.num_draft_tokens
        self._uncommitted = []


@dataclass
class Growing:
    """A sequence that grows a token a step. Without `rounds` its tokens are the target's own choices."""

    prompt: tuple[int, ...]
    sampling: Sampling
    rounds: Rounds | None = None
    token_ids: list[int] = field(default_factory=list)
    session: int = field(default_factory=lambda: next(_session_ids))

    def choose(self, posterior: Posterior) -> int:
        """The next token: the posterior's, or by the rule of hybrid acceptance at the node that the sequence has come to."""
        if self.rounds is None or self.rounds.built is None:
            return posterior.token_ids[0]
        whole, node = self.rounds.built.tree, self.rounds.node
        children = whole.children[node]
        draw = whole.drawn_children.get(node)
        draws = () if draw is None else (replace(draw, node=1 + children.index(draw.node)),)
        tokens = (whole.token_ids[node], *(whole.token_ids[child] for child in children))
        star = DraftTree(tokens, (-1, *[0] * len(children)), draws)
        assert posterior.distributions is not None
        acceptance = accept_hybrid(
            star,
            (posterior.token_ids[0], *[0] * len(children)),
            posterior.distributions.probabilities,
            seed=self.sampling.seed,
            root_position=len(self.prompt) + len(self.token_ids) - 1,
        )
        return acceptance.token_ids(star)[0]


def grow(target: TargetEngine, sequences: Sequence[Growing], max_tokens: int) -> None:
    """Run all sequences to their end or to `max_tokens`, MAX_BATCH_SIZE at a time."""
    ends = set(target.target.end_token_ids)
    for start in range(0, len(sequences), MAX_BATCH_SIZE):
        batch = list(sequences[start : start + MAX_BATCH_SIZE])
        known = [target.open(sequence.session, sequence.prompt, sequence.sampling) for sequence in batch]
        chunks = [
            PrefillChunk(sequence.session, sequence.prompt[num_known:], last=True)
            for sequence, num_known in zip(batch, known, strict=True)
        ]
        for sequence, posterior in zip(batch, target.step(chunks), strict=True):
            _append(sequence, posterior)
        while running := [
            sequence for sequence in batch if len(sequence.token_ids) < max_tokens and sequence.token_ids[-1] not in ends
        ]:
            trees = [DraftTree.lone_root(sequence.token_ids[-1]) for sequence in running]
            work = [Scoring(sequence.session, tree) for sequence, tree in zip(running, trees, strict=True)]
            for sequence, posterior in zip(running, target.step(work), strict=True):
                _append(sequence, posterior)
                target.keep(sequence.session, Acceptance((0,), sequence.token_ids[-1]))
        for sequence in batch:
            target.release(sequence.session)


def _append(sequence: Growing, posterior: Posterior) -> None:
    token_id = sequence.choose(posterior)
    sequence.token_ids.append(token_id)
    if sequence.rounds is not None:
        sequence.rounds.take(token_id)


def noise_builder(budget: int, seed: int, weights: Weights) -> Builder:
    """Trees that aim at the noise with these weights; a noise weight of 0 is the plain tree."""

    def build(root: int, marginals: Marginals, root_position: int) -> BuiltTree:
        if weights.noise == 0 or not marginals.num_depths:
            return build_tree(root, marginals, budget)
        scores = perturb(marginals, seed, root_position, log_prob_weight=weights.log_prob, noise_weight=weights.noise)
        return build_tree(root, marginals, budget, branch_scores=scores)

    return build


def hybrid_builder(budget: int, seed: int, width: int) -> Builder:
    """Trees whose nodes have up to `width` children, the last drawn."""

    def build(root: int, marginals: Marginals, root_position: int) -> BuiltTree:
        return build_hybrid_tree(root, marginals, budget, width=width, seed=seed, root_position=root_position)

    return build


def replayed(drafter: DraftEngine, sequence: Growing, width: int, weights: Weights, budget: int) -> Rounds:
    """The rounds that a finished sequence takes with trees of these weights."""
    sampling = replace(sequence.sampling, shares_noise=weights.noise > 0)
    build = noise_builder(budget, sampling.seed, Weights(1.0, 0.0) if sampling.is_greedy else weights)
    rounds = Rounds(drafter, sequence.prompt, sampling, width, build)
    for token_id in sequence.token_ids:
        rounds.take(token_id)
    rounds.close()
    return rounds


def calibrated(drafter: DraftEngine, sequences: Sequence[Growing]) -> Weights:
    """Weights fitted to rounds over these sequences."""
    choices = []
    for sequence in sequences:
        budget, seed = RECORDING_BUDGET, sequence.sampling.seed
        inner = noise_builder(budget, seed, DEFAULT_WEIGHTS)
        starts: list[tuple[BuiltTree, int]] = []

        def build(root: int, marginals: Marginals, root_position: int) -> BuiltTree:
            built = inner(root, marginals, root_position)  # noqa: B023 - used up before the loop goes on
            starts.append((built, root_position))  # noqa: B023
            return built

        rounds = Rounds(drafter, sequence.prompt, sequence.sampling, 32, build)
        for token_id in sequence.token_ids:
            rounds.take(token_id)
        rounds.close()
        for built, root_position in starts:
            following = sequence.token_ids[root_position - len(sequence.prompt) + 1 :]
            choices += choices_of_round(built.tree, built.scores, following, seed, root_position)
    return fit(choices)


def cell(rule: str, shape: Shape, temperature: float, rounds: Sequence[Rounds]) -> Cell:
    """The figure over many generations."""
    return Cell(
        rule,
        shape.name,
        temperature,
        sum(each.num_tokens for each in rounds),
        sum(each.num_rounds for each in rounds),
        sum(each.num_draft_tokens for each in rounds),
    )


def cells_of(
    target: TargetEngine, drafter: DraftEngine, prompts: Sequence[tuple[int, ...]], temperature: float, max_tokens: int
) -> Iterator[Cell]:
    """All figures at one temperature."""
    shapes = [Shape(name, budget, width) for name, (budget, width) in SHAPES.items()]
    sequences = [Growing(prompt, Sampling(temperature=temperature, seed=100 + number)) for number, prompt in enumerate(prompts)]
    grow(target, sequences, max_tokens)
    calibrating, evaluated = sequences[:NUM_CALIBRATION_PROMPTS], sequences[NUM_CALIBRATION_PROMPTS:]
    rules = {"plain tree": Weights(1.0, 0.0)}
    if temperature > 0:
        rules["shared noise"] = DEFAULT_WEIGHTS
        try:
            fitted = calibrated(drafter, calibrating)
            rules[f"shared noise, calibrated ({fitted.log_prob:.2f}, {fitted.noise:.2f})"] = fitted
        except ValueError as error:  # a drafter that offers nothing to choose from has nothing to calibrate
            print(f"T = {temperature}: {error}", flush=True)
    for shape in shapes:
        for rule, weights in rules.items():
            rounds = [replayed(drafter, sequence, shape.width, weights, shape.budget) for sequence in evaluated]
            yield cell(rule, shape, temperature, rounds)
    if temperature > 0:
        yield from _hybrid_cells(target, drafter, evaluated, shapes, max_tokens)


def _hybrid_cells(
    target: TargetEngine, drafter: DraftEngine, plain: Sequence[Growing], shapes: Sequence[Shape], max_tokens: int
) -> Iterator[Cell]:
    for shape in shapes:
        growing = []
        for sequence in plain:
            sampling = replace(sequence.sampling, shares_noise=False)
            build = hybrid_builder(shape.budget, sampling.seed, HYBRID_WIDTHS[shape.name])
            rounds = Rounds(drafter, sequence.prompt, sampling, 32, build)
            growing.append(Growing(sequence.prompt, sequence.sampling, rounds))
        grow(target, growing, max_tokens)
        finished = [sequence.rounds for sequence in growing if sequence.rounds is not None]
        for each in finished:
            each.close()
        yield cell("hybrid rejection", shape, sampling.temperature, finished)


def table(cells: Sequence[Cell]) -> str:
    """The figures as a Markdown table: a line a rule and temperature, a column a shape."""
    found = {(each.rule, each.temperature, each.shape): each.acceptance_length for each in cells}
    lines = ["| T | rule | " + " | ".join(SHAPES) + " |", "|---|---|" + "---|" * len(SHAPES)]
    for temperature, rule in dict.fromkeys((each.temperature, each.rule) for each in cells):
        figures = [f"{found[rule, temperature, shape]:.2f}" for shape in SHAPES if (rule, temperature, shape) in found]
        lines.append(f"| {temperature:g} | {rule} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def report(cells: Sequence[Cell], drafter: DraftEngine, arguments: argparse.Namespace, seconds: float) -> str:
    """The table with what was measured and how."""
    described = drafter.drafter
    command = (
        f"python -m benchmarks.ablation.sampling --model {arguments.model} --drafter {arguments.drafter} "
        f"--num-prompts {arguments.num_prompts} --max-tokens {arguments.max_tokens}"
    )
    return (
        "# Ablation: trees and acceptance under sampling\n\n"
        "Tokens a round (bonus included, the prefill's token left out), "
        f"{arguments.num_prompts} prompts, at most {arguments.max_tokens} tokens each; float32, {arguments.model}; "
        f"drafter {described.engine} ({described.model}), horizon {described.horizon}. Calibrated on "
        f"{NUM_CALIBRATION_PROMPTS} other prompts. Chain: budget 8, width 1.\n\n"
        f"{table(cells)}\n\n"
        f"`{command}`, {seconds:.0f} s on {platform.machine()}, "
        f"Python {platform.python_version()}, numpy {np.__version__}.\n"
    )


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description="Ablation of trees and acceptance under sampling.")
    parser.add_argument("--model", default="smollm2-135m", help="target: an alias, a directory, or simulated")
    parser.add_argument(
        "--drafter", default="ngram", help="ngram, simulated, or the alias or directory of a small causal model"
    )
    parser.add_argument("--num-prompts", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--temperatures", type=float, nargs="*", default=TEMPERATURES)
    parser.add_argument("--output-stem", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started = time.monotonic()
    target, drafter = load_target(arguments.model, arguments.threads), load_drafter(arguments.drafter)
    tokenization = tokenization_of(arguments.model)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: NUM_CALIBRATION_PROMPTS + arguments.num_prompts]
    prompts = [tuple(tokenization.encode_chat([{"role": "user", "content": line}])) for line in lines]
    cells: list[Cell] = []
    for temperature in arguments.temperatures:
        cells += cells_of(target, drafter, prompts, temperature, arguments.max_tokens)
        text = report(cells, drafter, arguments, time.monotonic() - started)
        arguments.output_stem.with_suffix(".md").write_text(text, encoding="utf-8")
        figures = [{**asdict(each), "acceptance_length": each.acceptance_length} for each in cells]
        arguments.output_stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
