"""What drafters say when they draft is what they learnt to say: inference against training."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from draft_service.engines.dflash.model import BlockIngestion, DFlashCache, draft_blocks
from draft_service.engines.recurrent.model import DraftCache, Ingestion, RecurrentDrafter, draft, ingest
from tests.training.conftest import fresh_recipe
from training.batches import Batch, Captured
from training.learners.dflash import block_outputs
from training.learners.recurrent import chain_outputs, first_step
from training.objective import distil, soft_targets
from training.recipes import BlockRecipe, RecurrentRecipe
from training.target import Target
from training.workspace import Workspace

TOLERANCE = 1e-4


def recurrent(target: Target, workspace: Workspace) -> RecurrentDrafter:
    """A fresh recurrent drafter."""
    recipe = fresh_recipe(target, workspace)
    assert isinstance(recipe, RecurrentRecipe)
    return recipe.drafter


def two_answers(workspace: Workspace) -> Batch:
    """Two captured sequences."""
    captured = Captured(workspace.shards)
    return captured.batch(captured.keys[:2])


def preceding(drafter: RecurrentDrafter, batch: Batch) -> Tensor:
    """Features of the position before each, zero before the first."""
    return torch.nn.functional.pad(drafter.features(batch.taps.float()), (0, 0, 1, 0))


@torch.no_grad()
def test_ingesting_in_pieces_equals_the_whole_sequence(target: Target, workspace: Workspace) -> None:
    """However a sequence is cut into commits, and whoever shares the batch, the output at its last token is the same."""
    drafter, batch = recurrent(target, workspace), two_answers(workspace)
    features, length = preceding(drafter, batch), int(batch.lengths.min())
    expected = first_step(drafter, batch.token_ids, batch.taps).outputs[:, length - 1]
    caches = [DraftCache(drafter.config, capacity=2) for _ in range(2)]
    for cuts in ((0, 3, 4, length), (0, 5, 6, length)):
        for start, end in pairwise(cuts):
            pieces = [
                Ingestion(cache, batch.token_ids[row, start:end], features[row, start:end]) for row, cache in enumerate(caches)
            ]
            outputs = ingest(drafter, pieces)
        torch.testing.assert_close(outputs, expected, atol=TOLERANCE, rtol=TOLERANCE)
        caches = [DraftCache(drafter.config, capacity=2) for _ in range(2)]


@torch.no_grad()
def test_a_drafted_chain_is_the_chain_of_training(target: Target, workspace: Workspace) -> None:
    """Log-probs at each depth equal those of the training's chain along the same tokens."""
    drafter, batch = recurrent(target, workspace), two_answers(workspace)
    features, root = preceding(drafter, batch), int(batch.prompt_lengths[0]) + 2
    ingestion = Ingestion(DraftCache(drafter.config), batch.token_ids[0, : root + 1], features[0, : root + 1])
    (drafted,) = draft(drafter, [ingestion], horizon=3, width=200, beam=1)
    token_ids = batch.token_ids[:1].clone()
    token_ids[0, root + 1 : root + 3] = torch.tensor(drafted.token_ids[1:])
    anchors = torch.tensor([[root]])
    first = first_step(drafter, batch.token_ids[:1], batch.taps[:1])
    outputs = [first.outputs[:, root : root + 1], *chain_outputs(drafter, token_ids, first, anchors, 3)]
    for depth, output in enumerate(outputs):
        expected = drafter.log_probs(output)[0, 0].sort(descending=True).values
        torch.testing.assert_close(drafted.child_log_probs[depth], expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_node_of_a_beam_knows_its_own_path_alone(target: Target, workspace: Workspace) -> None:
    """Each expanded node's distribution equals that of committing nothing but its path as a chain; caches keep no draft."""
    drafter, batch = recurrent(target, workspace), two_answers(workspace)
    features, root = preceding(drafter, batch), int(batch.prompt_lengths[0]) + 2
    cache = DraftCache(drafter.config)
    ingestion = Ingestion(cache, batch.token_ids[0, : root + 1], features[0, : root + 1])
    (drafted,) = draft(drafter, [ingestion], horizon=3, width=8, beam=3)
    assert cache.length == root + 1
    assert len(drafted.token_ids) == 1 + 3 + 3
    first = first_step(drafter, batch.token_ids[:1], batch.taps[:1])
    for node in range(4, 7):
        parent = drafted.parents[node]
        token_ids = batch.token_ids[:1].clone()
        token_ids[0, root + 1 : root + 3] = torch.tensor([drafted.token_ids[parent], drafted.token_ids[node]])
        *_, output = chain_outputs(drafter, token_ids, first, torch.tensor([[root]]), 3)
        expected = drafter.log_probs(output)[0, 0].sort(descending=True).values[:8]
        torch.testing.assert_close(drafted.child_log_probs[node], expected, atol=TOLERANCE, rtol=TOLERANCE)


@torch.no_grad()
def test_a_drafted_block_is_the_block_of_training(target: Target, workspace: Workspace) -> None:
    """A block drafted over a cache filled in two commits equals the same block among others in a training batch."""
    recipe, batch = fresh_recipe(target, workspace, "dflash"), two_answers(workspace)
    assert isinstance(recipe, BlockRecipe)
    drafter, bonus = recipe.drafter, int(batch.prompt_lengths[0]) + 3
    features, cache = drafter.features(batch.taps.float()), DFlashCache(drafter.config)
    draft_blocks(drafter, [BlockIngestion(cache, features[0, : bonus - 2], int(batch.token_ids[0, bonus - 2]))])
    bonus_id = int(batch.token_ids[0, bonus])
    drafted = draft_blocks(drafter, [BlockIngestion(cache, features[0, bonus - 2 : bonus], bonus_id)])
    trained = block_outputs(drafter, batch, torch.tensor([[bonus - 1, bonus], [bonus, bonus]]))[0, 1, 1:]
    torch.testing.assert_close(drafted[0], drafter.logits(trained), atol=TOLERANCE, rtol=TOLERANCE)


def test_the_distillation_has_the_gradient_of_cross_entropy() -> None:
    """Loss and gradient equal autograd's on the same bfloat16 logits, to that precision; targets are distributions."""
    torch.manual_seed(0)
    head, final, weights = torch.randn(40, 16), torch.randn(9, 16), torch.rand(9)
    targets = soft_targets(final, head, hard_share=0.3)
    torch.testing.assert_close(targets.float().sum(-1), torch.ones(9), atol=2e-2, rtol=0.0)
    rows = torch.randn(9, 16).bfloat16().float().requires_grad_()
    reference = rows.detach().clone().requires_grad_()
    distillation = distil(rows, head, targets, weights)
    torch.autograd.backward(distillation.loss)
    log_probs = (reference @ head.bfloat16().float().T).log_softmax(-1)
    expected = -(weights[:, None] * targets.float() * log_probs).sum()
    torch.autograd.backward(expected)
    torch.testing.assert_close(distillation.loss, expected, atol=0.3, rtol=2e-2)
    torch.testing.assert_close(rows.grad, reference.grad, atol=0.1, rtol=5e-2)
