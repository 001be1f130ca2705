"""This file is one rank: a process that holds its share of the target and computes the steps that rank 0 is told of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_service.engine import Posterior
from verify_service.engines.features import FeatureTaps
from verify_service.engines.ranks import serving
from verify_service.engines.ranks.messages import NotFinite, StepMasks
from verify_service.engines.ranks.questions import AskProbabilities, Question
from verify_service.engines.sampling import NoiseRows, TensorDistributions, allow_only, choose, likeliest, process
from verify_service.engines.sglang import private
from verify_service.engines.sglang.batches import chain_batch, num_padding, table_writes, tree_batch, width_for
from verify_service.engines.sglang.messages import Part, RankPlan, Ready, StepAnswer, StepCommand
from verify_service.engines.sglang.release import check_version


def run_rank(plan: RankPlan, parent: Connection) -> None:
    """The process of one rank, until it is told to stop."""
    serving.run(plan.place.tp_rank, parent, partial(_serve, plan, parent))


def _serve(plan: RankPlan, parent: Connection) -> None:
    check_version()
    private.check_names()
    if plan.num_threads is not None:
        torch.set_num_threads(plan.num_threads)
    runner = private.load(plan.arguments, plan.place, plan.widths, plan.tap_layers)
    is_first = plan.place.tp_rank == 0
    step = RankStep(
        runner, plan.widths, plan.max_sessions, _taps(plan, runner.device), partial(_step_masks, parent) if is_first else None
    )
    source = partial(_command_or_idle, parent, step)
    if is_first:
        parent.send(Ready(runner.num_slots, runner.num_rows, runner.attention_backend, runner.captured))
    for command in serving.commands(source, plan.place.tp_rank, plan.num_ranks):
        assert isinstance(command, StepCommand)
        answer = step(command)
        if is_first:
            parent.send(answer)


def _taps(plan: RankPlan, device: torch.device) -> FeatureTaps | None:
    if plan.feature_projection is None or plan.place.tp_rank:
        return None
    return FeatureTaps.load(plan.feature_projection, num_layers=plan.num_layers, hidden_size=plan.hidden_size, device=device)


def _command_or_idle(parent: Connection, step: RankStep) -> object:
    """The parent's next command. Questions about the last step are answered here, the other ranks know nothing of them."""
    while isinstance(said := serving.said_by(parent), Question):
        parent.send(step.answer(said))
    return said


def _step_masks(parent: Connection) -> StepMasks:
    """The masks of the step that is under way."""
    said = parent.recv()
    assert isinstance(said, StepMasks), "masks follow a step with masked parts"
    return said


class RankStep:
    """One step on this rank: chunks in one forward, trees in another, then the choices."""

    def __init__(
        self,
        runner: private.TargetRunner,
        widths: Sequence[int],
        max_sessions: int,
        taps: FeatureTaps | None,
        receive_masks: Callable[[], StepMasks] | None,
    ) -> None:
        """`receive_masks` waits for the masks of the step under way; None on ranks whose choices nobody asks for."""
        self._runner = runner
        self._widths = widths
        self._noise = lru_cache(max_sessions)(NoiseRows)
        self._taps = taps
        self._receive_masks = receive_masks
        self._masks: StepMasks | None = None
        self._distributions: dict[int, TensorDistributions] = {}  # of the last step, by the number of the part

    def __call__(self, command: StepCommand) -> StepAnswer | NotFinite:
        chains = [(number, part) for number, part in enumerate(command.parts) if part.tree is None]
        trees = [(number, part) for number, part in enumerate(command.parts) if part.tree is not None]
        width = width_for(self._widths, max((len(part.token_ids) for _, part in trees), default=1))
        self._distributions.clear()
        self._masks = None
        self._runner.write_table(table_writes(command.parts, width))
        try:
            posteriors = self._chains(chains) if chains else {}
            missed_graph = self._trees(trees, width, posteriors) if trees else False
        except FloatingPointError as error:
            return NotFinite(str(error))
        finally:
            if any(part.is_masked for part in command.parts):
                self._receive_once()  # also where nothing asked for them: the next message is another step
        ordered = tuple(posteriors[number] for number in range(len(command.parts)))
        return StepAnswer(ordered, num_padding(command.parts, width), missed_graph)

    def answer(self, question: Question) -> object:
        """What the last step's distributions say."""
        distributions = self._distributions[question.part]
        if isinstance(question, AskProbabilities):
            return distributions.probabilities(question.node)
        return distributions.log_probs(question.nodes, question.token_ids, question.num_top)

    def _chains(self, numbered: Sequence[tuple[int, Part]]) -> dict[int, Posterior]:
        parts = [part for _, part in numbered]
        output = self._runner.extend(chain_batch(parts))
        logits = output.logits.clone()  # the trees' forward may use the same memory
        features = self._features(output.features, parts, [len(part.token_ids) for part in parts])
        return {
            number: self._posterior(number, part, logits[row : row + part.num_choices], features[row])
            for row, (number, part) in enumerate(numbered)
        }

    def _trees(self, numbered: Sequence[tuple[int, Part]], width: int, posteriors: dict[int, Posterior]) -> bool:
        """Adds the trees' posteriors; true if they missed their graph."""
        parts = [part for _, part in numbered]
        output = self._runner.verify(tree_batch(parts, width))
        features = self._features(output.features, parts, [width] * len(parts))
        for row, (number, part) in enumerate(numbered):
            logits = output.logits[row * width : row * width + len(part.token_ids)]
            posteriors[number] = self._posterior(number, part, logits, features[row])
        return self._runner.captured and not output.ran_graph

    @torch.inference_mode()
    def _posterior(self, number: int, part: Part, logits: Tensor, features: NDArray[np.float32] | None) -> Posterior:
        """The target's choice after each of the part's last rows, whose logits these are."""
        if not part.num_choices:
            return Posterior((), features=features)
        log_probs = process(allow_only(logits, self._rows(number) if part.is_masked else None), part.sampling, part.histories)
        noise_rows = None
        if not part.sampling.is_greedy:
            rows = self._noise(part.sampling.seed, logits.shape[1])
            noise_rows = rows.at(_chosen_positions(part), logits.device)
        chosen = choose(log_probs, noise_rows)
        count = part.num_node_probabilities
        likely = likeliest(log_probs, count) if count else ()
        self._distributions[number] = TensorDistributions(logits, log_probs, is_greedy=part.sampling.is_greedy)
        return Posterior(tuple(chosen.tolist()), likely, features)

    def _rows(self, number: int) -> NDArray[np.int32] | None:
        """What the part may choose; on a rank whose choices nobody asks for that does not matter."""
        masks = self._receive_once()
        return None if masks is None else masks.rows[number]

    def _receive_once(self) -> StepMasks | None:
        if self._masks is None and self._receive_masks is not None:
            self._masks = self._receive_masks()
        return self._masks

    def _features(self, tapped: Tensor | None, parts: Sequence[Part], sizes: Sequence[int]) -> list[NDArray[np.float32] | None]:
        """Features of each part's own rows: fused if there is a projection, else the tapped outputs side by side."""
        if tapped is None:
            return [None] * len(parts)
        features: list[NDArray[np.float32] | None] = []
        for part, rows in zip(parts, torch.split(tapped, list(sizes)), strict=True):
            if not part.wants_features:
                features.append(None)
                continue
            own = rows[: len(part.token_ids)]
            if self._taps is not None:
                own = self._taps.of_taps(own.chunk(len(self._taps.projection.tapped_layers), dim=-1))
            features.append(own.float().cpu().numpy())
        return features


def _chosen_positions(part: Part) -> list[int]:
    """The positions of the tokens that are chosen: one after each node, or after the last token of a chunk."""
    if part.tree is None:
        return [part.prefix_length + len(part.token_ids)]
    return [part.prefix_length + depth + 1 for depth in part.tree.depths]
