"""This file is the report: the acceptance table of a drafter beside n-gram look-up, and its curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from training.checkpoints import Progress
from training.evaluation import Guess, GuessedAnswer, chain_rule, conditional_rule, marginal_rule, simulate

BUDGETS = (4, 8, 16, 32)
NGRAM_LENGTHS = (3, 2)


def acceptance_lengths(answers: Sequence[GuessedAnswer[Guess]], horizon: int) -> dict[str, float]:
    """Tokens a round of the chain, and of trees at each budget: over marginals by depth, and over conditional guesses where the
    drafter expanded more than its best path."""
    lengths = {"chain": simulate(answers, chain_rule(horizon)).length}
    lengths |= {f"tree-{budget}": simulate(answers, marginal_rule(budget)).length for budget in BUDGETS}
    if any(len(guess.paths) > horizon for answer in answers for guess in answer.guesses):
        lengths |= {f"conditional-{budget}": simulate(answers, conditional_rule(budget)).length for budget in BUDGETS}
    return lengths


def ngram_length(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], num_draft_tokens: int) -> float:
    """Tokens a round of prompt look-up: the tokens after the latest earlier occurrence of the last 3, else 2, tokens."""
    num_rounds = num_tokens = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens, position, last = [*prompt, *answer], len(prompt), len(prompt) + len(answer) - 1
        while position < last:
            drafted = _looked_up(tokens[: position + 1], num_draft_tokens)
            gained = 1
            for guess, token in zip(drafted, tokens[position + 1 : last], strict=False):
                if guess != token:
                    break
                gained += 1
            position, num_rounds, num_tokens = position + gained, num_rounds + 1, num_tokens + gained
    return num_tokens / num_rounds if num_rounds else 0.0


def _looked_up(tokens: Sequence[int], num_draft_tokens: int) -> Sequence[int]:
    for length in NGRAM_LENGTHS:
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                return tokens[start + length : start + length + num_draft_tokens]
    return ()


def draw_curves(progress: Progress, path: Path) -> None:
    """Write the loss and the acceptance lengths over CPU minutes of training as one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, lengths) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    minutes_per_step = progress.minutes / max(progress.step, 1)
    losses.plot(
        [step * minutes_per_step for step, _, _ in progress.losses], [loss for _, loss, _ in progress.losses], linewidth=0.8
    )
    losses.set(xlabel="CPU minutes", ylabel="training loss")
    for name in ("tree-32", "tree-16", "tree-8", "tree-4", "chain"):
        points = [(row.minutes, row.lengths[name]) for row in progress.evaluations if name in row.lengths]
        if points:
            lengths.plot(*zip(*points, strict=True), marker=".", label=name)
    lengths.set(xlabel="CPU minutes", ylabel="tokens a round, held-out subset")
    lengths.legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)
