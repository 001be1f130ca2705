"""The walk on the device is that of the core, for every tree and every choice; what it accepts is where it is kept."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.target_contract import GREEDY, PENALISED, SAMPLED, continuation, prefill, random_tree, score
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.core.acceptance import Acceptance, accept
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import Scoring
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.static_program import visibility
from verify_service.engines.transformers.walk import Trees, Walk, walk

SIZES: dict[str, Any] = {"max_tree_nodes": 24, "max_context": 96, "kv_tokens": 1024}
SEEDED = Sampling(temperature=1.2, seed=2**64 - 3)

tokens = st.integers(0, 2)  # few, so that siblings are equal and choices are met
scored = st.lists(st.tuples(tokens, st.integers(0, 40), tokens), min_size=1, max_size=40).map(
    lambda nodes: (
        DraftTree(
            tuple(token for token, _, _ in nodes),
            (-1, *(parent % number for number, (_, parent, _) in enumerate(nodes[1:], start=1))),
        ),
        [choice for _, _, choice in nodes],
    )
)


def walked(batch: Sequence[tuple[DraftTree, list[int]]], num_nodes: int) -> list[Acceptance]:
    """Of trees with the choices after their nodes, padded as a bucket of that many nodes pads them."""
    shape = (len(batch), num_nodes)
    token_ids, parents, chosen = (torch.zeros(shape, dtype=torch.int64) for _ in range(3))
    for row, (tree, choices) in enumerate(batch):
        token_ids[row, : len(tree)] = torch.tensor(tree.token_ids)
        parents[row, 1 : len(tree)] = torch.tensor(tree.parents[1:], dtype=torch.int64)
        chosen[row, : len(tree)] = torch.tensor(choices)
    visible = visibility(parents)
    counts = torch.tensor([len(tree) for tree, _ in batch])
    found = walk(Trees(token_ids, parents, visible.sum(-1) - 1, visible, counts), chosen)
    return [Walk.acceptance(row) for row in found.packed().tolist()]


@settings(max_examples=300, deadline=None)
@given(batch=st.lists(scored, min_size=1, max_size=4), padding=st.sampled_from([0, 1, 9]))
def test_it_is_the_walk_of_the_core(batch: list[tuple[DraftTree, list[int]]], padding: int) -> None:
    """Equal siblings, choices that no child has, padding with a token that is chosen: nodes and bonus are the core's."""
    num_nodes = max(len(tree) for tree, _ in batch) + padding
    assert walked(batch, num_nodes) == [accept(tree, choices) for tree, choices in batch]


def test_it_follows_a_path_to_its_end() -> None:
    """A chain of every bucket's length is accepted whole, and one that is left early up to there."""
    for length in (1, 2, 8, 129, 513):
        chain = DraftTree(tuple(range(length)), (-1, *range(length - 1)))
        choices = list(range(1, length + 1))
        assert walked([(chain, choices)], length) == [Acceptance(tuple(range(length)), length)]
        choices[length // 2] = 9999
        assert walked([(chain, choices)], length) == [accept(chain, choices)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3", head_dim=16)


def tree_around(spine: Sequence[int], rng: random.Random) -> DraftTree:
    """A tree with this path from its root, whose nodes have others between them."""
    token_ids, parents, last = [spine[0]], [-1], 0
    for token_id in spine[1:]:
        for _ in range(rng.randrange(3)):
            parents.append(rng.randrange(len(token_ids)))
            token_ids.append(rng.randrange(VOCABULARY_SIZE))
        parents.append(last)
        token_ids.append(token_id)
        last = len(token_ids) - 1
    return DraftTree(tuple(token_ids), tuple(parents))


@pytest.mark.parametrize("page_size", [1, 8])
def test_what_the_step_accepts_is_where_it_is_kept(folder: Path, page_size: int) -> None:
    """Sessions that the step accepts for, beside others that the host accepts for, go on as the target alone would."""
    samplings = [GREEDY, SEEDED, SAMPLED, PENALISED]
    prompts = [[5 + number, 9, 3, 7 * number + 1, 2] for number in range(len(samplings))]
    alone = TransformersTarget.load(folder, graphs="off", **SIZES)
    texts = [continuation(alone, 0, prompt, 40, sampling) for prompt, sampling in zip(prompts, samplings, strict=True)]
    engine = TransformersTarget.load(folder, graphs="on", kv_page_size=page_size, **SIZES)
    for session, sampling in enumerate(samplings):
        assert prefill(engine, session, prompts[session], sampling).token_ids == (texts[session][0],)
    rng, num_committed, num_scattered = random.Random(4), [1] * len(samplings), 0
    for number in range(6):
        trees = [tree_around(texts[session][at - 1 : at + 2 + number % 4], rng) for session, at in enumerate(num_committed)]
        posteriors = engine.step([Scoring(session, tree, accepts=session > 0) for session, tree in enumerate(trees)])
        assert [posterior.acceptance is not None for posterior in posteriors] == [False, True, False, False]
        for session, (tree, posterior) in enumerate(zip(trees, posteriors, strict=True)):
            acceptance = accept(tree, posterior.token_ids)
            assert posterior.acceptance in (None, acceptance)
            assert len(acceptance.nodes) > 1
            num_scattered += posterior.acceptance is not None and acceptance.nodes[-1] >= len(acceptance.nodes)
            engine.keep(session, acceptance)
            start, num_committed[session] = num_committed[session], num_committed[session] + len(acceptance.nodes)
            assert list(acceptance.token_ids(tree)) == texts[session][start : num_committed[session]]
    assert num_scattered


def test_no_other_path_can_be_kept(folder: Path) -> None:
    """What the step has accepted is what is kept: its rows may have been moved."""
    engine = TransformersTarget.load(folder, graphs="on", kv_page_size=8, **SIZES)
    text = continuation(engine, 1, [4, 5, 6], 3)
    prefill(engine, 2, [4, 5, 6])
    tree = tree_around(text, random.Random(1))
    (posterior,) = engine.step([Scoring(2, tree, accepts=True)])
    assert posterior.acceptance is not None
    with pytest.raises(ValueError, match=r"nodes \(0,\) are to be kept, the step has accepted"):
        engine.keep(2, Acceptance((0,), text[1]))
    engine.keep(2, posterior.acceptance)


def test_without_a_word_the_step_accepts_nothing(folder: Path) -> None:
    """A caller that accepts by itself may keep any path, also in larger pages."""
    engine = TransformersTarget.load(folder, graphs="on", kv_page_size=8, **SIZES)
    (root,) = prefill(engine, 1, [4, 5, 6]).token_ids
    tree = random_tree(random.Random(2), root, VOCABULARY_SIZE, 12)
    assert score(engine, 1, tree).acceptance is None
    path = tree.path(11)
    engine.keep(1, Acceptance(path, 3))
    found = score(engine, 1, DraftTree.lone_root(3))
    prompt = [4, 5, 6, *(tree.token_ids[node] for node in path), 3]
    assert found.token_ids == prefill(engine, 2, prompt).token_ids
