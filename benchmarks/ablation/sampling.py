"""This file is the ablation of tree building and acceptance under sampling, on the real model: tokens gained a round.

    python -m benchmarks.ablation.sampling [--drafter dflash] [--num-prompts 30] [--max-tokens 40] [--output-stem PATH]

Rules: *plain tree* (ranked by log-prob, the noise unknown to the drafter), *shared noise* with the default weights, the same
with weights calibrated on other prompts, and *hybrid rejection*. No rule needs a forward over its trees here: with shared noise
the output is the same whatever the trees, so that one path for each prompt and temperature serves all of them, and hybrid
rejection has on these paths the law that it has on its own (`rules`). The drafter guesses after every token of a path, as the
service lets it: conditional rows wherever it has them, but for hybrid rejection.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.ablation.drafts import drafted
from benchmarks.ablation.engines import load_drafter, load_target, tokenization_of
from benchmarks.ablation.paths import Path as TargetPath
from benchmarks.ablation.paths import follow
from benchmarks.ablation.rules import Spot, SpotRule, aimed_tree, chain_rule, hybrid_rule, noise_rule, plain_rule
from draft_service.engine import DraftEngine, Drafter
from training.evaluation import GuessedAnswer, simulate
from treewire.core.build import USUAL_WEIGHTS, BranchWeights
from treewire.core.calibration import Choice, choices_of_round, fit
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.stack import DFLASH
from treewire.weights import DEFAULT_MODEL
from verify_service.engine import TargetEngine

PROMPTS = Path(__file__).with_name("prompts.txt")
RESULTS = Path(__file__).parents[1] / "results" / "ablation_sampling"
NUM_CALIBRATION_PROMPTS = 10
TEMPERATURES = (0.0, 0.3, 0.7, 1.0)
CHAIN = "chain"
TREES = {"B = 8": 8, "B = 16": 16, "B = 64": 64}  # budgets
BUDGETS = {CHAIN: 8, **TREES}
HYBRID_WIDTHS = {CHAIN: 1, "B = 8": 3, "B = 16": 3, "B = 64": 4}
WIDTH = 64
RECORDING_BUDGET = 64
NUM_CALIBRATED_DEPTHS = 3
PLAIN, NOISE, CALIBRATED, HYBRID = "plain tree", "shared noise, default weights", "shared noise, calibrated", "hybrid rejection"
CALIBRATED_HERE, CALIBRATED_BY_DEPTH = "the same, fitted at this temperature alone", "the same, fitted by depth"

Answers = Sequence[GuessedAnswer[Spot]]


@dataclass(frozen=True)
class Cell:
    """One figure of a table: tokens gained in rounds, the prefill's token left out, for each prompt."""

    condition: str
    rule: str
    shape: str
    num_tokens: tuple[int, ...]
    num_rounds: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens a round."""
        return sum(self.num_tokens) / sum(self.num_rounds)

    @property
    def standard_error(self) -> float:
        """Of the acceptance length, over the prompts."""
        rounds = np.array(self.num_rounds)
        residuals = np.array(self.num_tokens) - self.acceptance_length * rounds
        return float(residuals.std(ddof=1) / (rounds.mean() * np.sqrt(len(rounds)))) if len(rounds) > 1 else float("nan")


def cell(condition: str, rule: str, shape: str, answers: Answers, build: SpotRule) -> Cell:
    """The figure of one rule of building trees along paths."""
    gained = [simulate([answer], build) for answer in answers]
    return Cell(condition, rule, shape, tuple(each.num_tokens for each in gained), tuple(each.num_rounds for each in gained))


def deaf(sampling: Sampling) -> Sampling:
    """What a drafter is told that does not know the noise."""
    return replace(sampling, shares_noise=False)


def as_it_is(sampling: Sampling) -> Sampling:
    """What a drafter is told that knows all."""
    return sampling


def calibration_choices(drafter: DraftEngine, paths: Sequence[TargetPath]) -> list[Choice]:
    """The choices that rounds along these paths show, as `treewire calibrate` reads them off a running stack."""
    choices: list[Choice] = []

    def recorded(root: int, spot: Spot) -> DraftTree:
        built = aimed_tree(root, spot, RECORDING_BUDGET, [USUAL_WEIGHTS])
        choices.extend(choices_of_round(built.tree, built.scores, spot.following, spot.seed, spot.position, spot.temperature))
        return built.tree

    simulate(drafted(drafter, paths, told=as_it_is, width=WIDTH, takes_conditional=True), recorded)
    return choices


@dataclass(frozen=True)
class Calibration:
    """Weights fitted to the choices of all temperatures, of each alone, and of each depth, the last for all below."""

    pooled: BranchWeights
    by_temperature: dict[float, BranchWeights]
    by_depth: tuple[BranchWeights, ...]

    @classmethod
    def of(cls, choices: dict[float, list[Choice]]) -> Calibration:
        """Raises ValueError if there are too few choices."""
        pooled = [choice for group in choices.values() for choice in group]
        depths = range(1, NUM_CALIBRATED_DEPTHS + 1)
        by_depth = [[choice for choice in pooled if min(choice.depth, NUM_CALIBRATED_DEPTHS) == depth] for depth in depths]
        return cls(fit(pooled), {temperature: fit(group) for temperature, group in choices.items()}, tuple(map(fit, by_depth)))


class Ablation:
    """The tables of one drafter. `load` makes it, with the weights that it ranks its own prefixes by."""

    def __init__(self, load: Callable[[BranchWeights], DraftEngine], calibration: Calibration | None) -> None:
        self._load = load
        self._calibration = calibration

    def cells(self, temperature: float, paths: Sequence[TargetPath]) -> Iterator[Cell]:
        """Every rule at one temperature."""
        name, drafter = f"{temperature:g}", self._load(USUAL_WEIGHTS)
        by_depth = drafted(drafter, paths, told=deaf, width=WIDTH, takes_conditional=False)
        yield cell(name, PLAIN, CHAIN, by_depth, chain_rule(BUDGETS[CHAIN]))
        yield from Line(name, PLAIN, drafter, paths, deaf).trees(plain_rule)
        if temperature == 0.0:
            return
        noise = Line(name, NOISE, drafter, paths, as_it_is)
        yield noise.chain()
        yield from noise.trees(lambda budget: noise_rule(budget, USUAL_WEIGHTS))
        if self._calibration is not None:
            yield from self._calibrated(self._calibration, temperature, paths)
        for shape, budget in BUDGETS.items():
            yield cell(name, HYBRID, shape, by_depth, hybrid_rule(budget, HYBRID_WIDTHS[shape]))

    def _calibrated(self, fitted: Calibration, temperature: float, paths: Sequence[TargetPath]) -> Iterator[Cell]:
        line = Line(f"{temperature:g}", CALIBRATED, self._load(fitted.pooled), paths, as_it_is)
        yield line.chain()
        answers = line.answers(WIDTH)
        for rule, weights in (
            (CALIBRATED, (fitted.pooled,)),
            (CALIBRATED_HERE, (fitted.by_temperature[temperature],)),
            (CALIBRATED_BY_DEPTH, fitted.by_depth),
        ):
            for shape, budget in TREES.items():
                yield cell(line.condition, rule, shape, answers, noise_rule(budget, *weights))

    def told(
        self, condition: str, paths: Sequence[TargetPath], hearings: dict[str, Callable[[Sampling], Sampling]]
    ) -> Iterator[Cell]:
        """Trees aimed at the noise with a drafter that is told one or the other of the request's sampling."""
        weights = self._calibration.pooled if self._calibration else USUAL_WEIGHTS
        for rule, told in hearings.items():
            line = Line(condition, rule, self._load(weights), paths, told)
            yield from line.trees(lambda budget: noise_rule(budget, weights))


class Line(NamedTuple):
    """A line of a table: a rule in one condition, and the drafter, told of the request's sampling what `told` leaves of it."""

    condition: str
    rule: str
    drafter: DraftEngine
    paths: Sequence[TargetPath]
    told: Callable[[Sampling], Sampling]

    def answers(self, width: int) -> Answers:
        """The drafter's guesses along the paths, conditional ones among them."""
        return drafted(self.drafter, self.paths, told=self.told, width=width, takes_conditional=True)

    def trees(self, build: Callable[[int], SpotRule]) -> Iterator[Cell]:
        """Trees of every budget."""
        answers = self.answers(WIDTH)
        for shape, budget in TREES.items():
            yield cell(self.condition, self.rule, shape, answers, build(budget))

    def chain(self) -> Cell:
        """Rows of one token: the drafter's own ranking decides alone."""
        return cell(self.condition, self.rule, CHAIN, self.answers(1), chain_rule(BUDGETS[CHAIN]))


TOLD_ALL = "told all"


TRUNCATED, TRUNCATED_NAME = Sampling(temperature=1.0, top_p=0.9), "T = 1, top-p 0.9"


def without_top_p(sampling: Sampling) -> Sampling:
    """What a drafter is told that leaves no token out."""
    return replace(sampling, top_p=1.0)


def at_temperature_one(sampling: Sampling) -> Sampling:
    """What a drafter is told that always drafts at temperature 1."""
    return replace(sampling, temperature=1.0)


class Results:
    """What has been measured so far, and its two files."""

    def __init__(self, arguments: argparse.Namespace, drafter: Drafter) -> None:
        self._arguments, self._drafter = arguments, drafter
        self._started, self._cpu_started = time.monotonic(), time.process_time()
        self.calibration: Calibration | None = None
        self.cells: list[Cell] = []
        self.told: list[Cell] = []

    def note(self, stage: str) -> None:
        """Say how far it is."""
        print(f"{time.process_time() - self._cpu_started:6.0f} s of CPU: {stage}", flush=True)

    def write(self) -> None:
        """Write both files anew."""
        stem: Path = self._arguments.output_stem
        stem.with_suffix(".md").write_text(self._text(), encoding="utf-8")
        figures = {
            "calibration": asdict(self.calibration) if self.calibration else None,
            **{
                name: [
                    {**asdict(each), "acceptance_length": each.acceptance_length, "standard_error": each.standard_error}
                    for each in cells
                ]
                for name, cells in (("cells", self.cells), ("told", self.told))
            },
        }
        stem.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")

    def _text(self) -> str:
        arguments, drafter = self._arguments, self._drafter
        command = (
            f"python -m benchmarks.ablation.sampling --model {arguments.model} --drafter {arguments.drafter} "
            f"--num-prompts {arguments.num_prompts} --max-tokens {arguments.max_tokens}"
        )
        largest = max(each.standard_error for each in self.cells)
        parts = [
            "# Ablation: trees and acceptance under sampling",
            f"Tokens a round (bonus included, the prefill's token left out), {arguments.num_prompts} prompts, at most "
            f"{arguments.max_tokens} tokens each. Target {arguments.model} in float32; drafter {drafter.engine} "
            f"({drafter.model}), as the draft service runs it by default on this CPU, horizon {drafter.horizon}, at most "
            f"{drafter.max_prefixes} conditional rows a round. Chain: width 1. Standard error of a figure over the prompts: at "
            f"most {largest:.2f}; figures of one line are of the same texts, and so are those of one temperature.",
            table("T", sorted(self.cells, key=lambda each: float(each.condition))),
            *self._calibrated(),
            *self._kept(),
            *self._heard(),
            f"`{command}`, {(time.process_time() - self._cpu_started) / 60:.0f} minutes of CPU time, "
            f"{(time.monotonic() - self._started) / 60:.0f} minutes in all on {platform.machine()}, "
            f"Python {platform.python_version()}, numpy {np.__version__}.",
        ]
        return "\n\n".join(parts) + "\n"

    def _calibrated(self) -> Iterator[str]:
        if self.calibration is None:
            return
        alone = ", ".join(f"{_pair(each)} at {t:g}" for t, each in self.calibration.by_temperature.items())
        yield (
            f"Weights (log-prob, noise), fitted on {NUM_CALIBRATION_PROMPTS} other prompts: default {_pair(USUAL_WEIGHTS)}; "
            f"calibrated {_pair(self.calibration.pooled)} over all temperatures; {alone}; by depth from the first on "
            f"{', '.join(map(_pair, self.calibration.by_depth))}. Drafters rank by the pooled ones in all calibrated lines."
        )

    def _kept(self) -> Iterator[str]:
        """How much of the acceptance at temperature 0 is left at 1."""
        found = {(each.condition, each.rule, each.shape): each.acceptance_length for each in self.cells}
        rule = CALIBRATED if self.calibration else NOISE
        shares = [
            f"{shape} {found['1', rule, shape] / found['0', PLAIN, shape]:.0%}"
            for shape in BUDGETS
            if ("1", rule, shape) in found and ("0", PLAIN, shape) in found
        ]
        if shares:
            yield f"Acceptance length at T = 1 ({rule}) over that at T = 0: {', '.join(shares)}."

    def _heard(self) -> Iterator[str]:
        if self.told:
            yield "## What the drafter is told"
            yield "Shared noise with the same weights; the drafter's own distribution follows what it is told of the request's."
            yield table("sampling", self.told)


def table(title: str, cells: Sequence[Cell]) -> str:
    """The figures as a Markdown table: a line a condition and rule, a column a shape."""
    found = {(each.condition, each.rule, each.shape): each.acceptance_length for each in cells}
    lines = [f"| {title} | rule | " + " | ".join(BUDGETS) + " |", "|---|---|" + "---|" * len(BUDGETS)]
    for condition, rule in dict.fromkeys((each.condition, each.rule) for each in cells):
        figures = [f"{found[condition, rule, shape]:.2f}" if (condition, rule, shape) in found else "" for shape in BUDGETS]
        lines.append(f"| {condition} | {rule} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def _pair(weights: BranchWeights) -> str:
    return f"({weights.log_prob:.2f}, {weights.noise:.2f})"


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description="Ablation of trees and acceptance under sampling.")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="target: an alias, a directory, or simulated")
    parser.add_argument(
        "--drafter",
        default=DFLASH,
        help="dflash is the one shipped for the target; ngram, simulated, the directory of a drafter that reads features, or "
        "the alias or directory of a small causal model",
    )
    parser.add_argument("--num-prompts", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--temperatures", type=float, nargs="*", default=TEMPERATURES)
    parser.add_argument("--output-stem", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    load = lru_cache(partial(load_drafter, arguments.model, arguments.drafter))
    results = Results(arguments, load(USUAL_WEIGHTS).drafter)
    target = load_target(arguments.model, arguments.drafter, arguments.threads)
    tokenization = tokenization_of(arguments.model)
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()[: NUM_CALIBRATION_PROMPTS + arguments.num_prompts]
    prompts = [tuple(tokenization.encode_chat([{"role": "user", "content": line}])) for line in lines]
    run(arguments, target, load, prompts, results)


def run(
    arguments: argparse.Namespace,
    target: TargetEngine,
    load: Callable[[BranchWeights], DraftEngine],
    prompts: Sequence[tuple[int, ...]],
    results: Results,
) -> None:
    """Paths, calibration, tables; files are written as figures come."""
    paths: dict[float, list[TargetPath]] = {}
    known: list[TargetPath] = []
    for temperature in arguments.temperatures:
        paths[temperature] = follow(target, prompts, Sampling(temperature=temperature), arguments.max_tokens, known)
        known = known or paths[temperature]
        results.note(f"paths at T = {temperature:g}")
    evaluated = {temperature: each[NUM_CALIBRATION_PROMPTS:] for temperature, each in paths.items()}
    results.calibration = calibrated(
        load(USUAL_WEIGHTS),
        {temperature: each[:NUM_CALIBRATION_PROMPTS] for temperature, each in paths.items() if temperature > 0.0},
    )
    results.note("calibrated")
    ablation = Ablation(load, results.calibration)
    for temperature, each in evaluated.items():
        results.cells += ablation.cells(temperature, each)
        results.note(f"rules at T = {temperature:g}")
        results.write()
    for temperature in sorted(set(evaluated) - {0.0, 1.0}):
        name, rule = f"T = {temperature:g}", CALIBRATED if results.calibration else NOISE
        results.told += [
            replace(each, condition=name, rule=TOLD_ALL)
            for each in results.cells
            if (each.condition, each.rule) == (f"{temperature:g}", rule) and each.shape in TREES
        ]
        results.told += ablation.told(name, evaluated[temperature], {"told temperature 1": at_temperature_one})
        results.note(f"told at T = {temperature:g}")
        results.write()
    truncated = follow(
        target, prompts[NUM_CALIBRATION_PROMPTS:], TRUNCATED, arguments.max_tokens, known[NUM_CALIBRATION_PROMPTS:]
    )
    results.told += ablation.told(TRUNCATED_NAME, truncated, {TOLD_ALL: as_it_is, "told no top-p": without_top_p})
    results.note(f"told at {TRUNCATED_NAME}")
    results.write()


def calibrated(drafter: DraftEngine, paths: dict[float, list[TargetPath]]) -> Calibration | None:
    """What these paths are fitted to; None of a drafter that offers nothing to choose from."""
    choices = {temperature: calibration_choices(drafter, each) for temperature, each in paths.items()}
    try:
        return Calibration.of(choices)
    except ValueError as error:
        print(f"not calibrated: {error}", flush=True)
        return None


if __name__ == "__main__":
    main()
