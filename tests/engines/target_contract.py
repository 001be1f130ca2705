"""This file is the contract of a target engine as tests: a suite that every engine joins by saying how it is made."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from treewire.core.acceptance import Acceptance, accept
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from verify_service.engine import Posterior, PrefillChunk, Scoring, SessionId, TargetEngine

GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=11)
PENALISED = Sampling(
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=2.0,
    logit_bias=((3, -2.0), (5, 25.0)),
    min_tokens=12,
    stop_token_ids=(2, 7),
    seed=6,
)
MAX_TREE_NODES = 24
MAX_CONTEXT = 96


class CountingEngine(TargetEngine, Protocol):
    """An engine that counts what it holds and what it has computed."""

    positions_computed: int

    @property
    def num_sessions(self) -> int:
        """Open sessions."""

    @property
    def num_free_slots(self) -> int:
        """Token positions for which memory is free."""


@dataclass(frozen=True)
class Subject:
    """An engine under test: a fresh one, of MAX_TREE_NODES and MAX_CONTEXT, and the model behind it as an oracle."""

    make: Callable[[], CountingEngine]
    next_token_id: Callable[[Sequence[int]], int]


def prefill(
    engine: TargetEngine,
    session: SessionId,
    prompt: Sequence[int],
    sampling: Sampling = GREEDY,
    chunk_size: int = MAX_CONTEXT,
    num_node_probabilities: int = 0,
) -> Posterior:
    """Open a session and run its prompt in chunks; the posterior of the last one."""
    num_known = engine.open(session, prompt, sampling, num_node_probabilities=num_node_probabilities)
    posterior = Posterior(())
    for start in range(num_known, len(prompt), chunk_size):
        chunk = tuple(prompt[start : start + chunk_size])
        (posterior,) = engine.step([PrefillChunk(session, chunk, last=start + chunk_size >= len(prompt))])
    return posterior


def score(engine: TargetEngine, session: SessionId, tree: DraftTree) -> Posterior:
    """Score one tree alone."""
    (posterior,) = engine.step([Scoring(session, tree)])
    return posterior


def continuation(
    engine: TargetEngine,
    session: SessionId,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling = GREEDY,
    guess: Callable[[list[int]], DraftTree] = lambda committed: DraftTree.lone_root(committed[-1]),
) -> list[int]:
    """Generate with `guess` making the tree after what is committed (without the prompt)."""
    committed = list(prefill(engine, session, prompt, sampling).token_ids)
    while len(committed) < num_tokens:
        tree = guess(committed)
        acceptance = accept(tree, score(engine, session, tree).token_ids)
        engine.keep(session, acceptance)
        committed.extend(acceptance.token_ids(tree))
    engine.release(session)
    return committed[:num_tokens]


def random_tree(rng: random.Random, root: int, vocabulary_size: int, num_nodes: int, spine: Sequence[int] = ()) -> DraftTree:
    """A tree of random shape and tokens, no two siblings alike, with `spine` as one of its paths."""
    token_ids, parents = [root, *spine], [-1, *range(len(spine))]
    taken = {(parent, token) for parent, token in zip(parents, token_ids, strict=True)}
    while len(token_ids) < num_nodes:
        parent, token_id = rng.randrange(len(token_ids)), rng.randrange(vocabulary_size)
        if (parent, token_id) not in taken:
            taken.add((parent, token_id))
            token_ids.append(token_id)
            parents.append(parent)
    return DraftTree(tuple(token_ids), tuple(parents))


class TargetContract:
    """What must be true of every target engine. Subclasses give the fixture `subject`."""

    @pytest.fixture
    def subject(self) -> Subject:
        """The engine under test."""
        raise NotImplementedError

    @pytest.fixture
    def engine(self, subject: Subject) -> CountingEngine:
        """A fresh engine."""
        return subject.make()

    def test_each_node_is_answered_as_if_its_path_were_the_text(self, subject: Subject, engine: CountingEngine) -> None:
        """The posterior after a node is the model's next token after prompt and path, in trees of any shape."""
        rng = random.Random(1)
        for session in range(6):
            prompt = self.prompt(engine, rng, 1 + 5 * session)
            root = prefill(engine, session, prompt).token_ids[-1]
            assert root == subject.next_token_id(prompt)
            tree = random_tree(rng, root, engine.target.vocabulary_size, 1 + 4 * session)
            expected = [
                subject.next_token_id([*prompt, *(tree.token_ids[step] for step in tree.path(node))])
                for node in range(len(tree))
            ]
            assert list(score(engine, session, tree).token_ids) == expected

    @pytest.mark.parametrize("chunk_size", [1, 3, 7, 20])
    def test_a_prompt_in_chunks_is_the_same_prompt(self, engine: CountingEngine, chunk_size: int) -> None:
        """The size of prefill chunks changes no token, neither after the prompt nor later."""
        prompt = self.prompt(engine, random.Random(2), 20)
        whole, chunked = prefill(engine, 1, prompt), prefill(engine, 2, prompt, chunk_size=chunk_size)
        assert chunked == whole
        tree = random_tree(random.Random(3), whole.token_ids[-1], engine.target.vocabulary_size, 9)
        assert score(engine, 2, tree) == score(engine, 1, tree)

    def test_a_chunk_before_the_last_chooses_nothing(self, engine: CountingEngine) -> None:
        """Only the last chunk of a prompt has a posterior."""
        engine.open(1, [1, 2, 3], GREEDY)
        assert engine.step([PrefillChunk(1, (1, 2), last=False)])[0].token_ids == ()
        assert len(engine.step([PrefillChunk(1, (3,), last=True)])[0].token_ids) == 1

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, Sampling(temperature=1.3, seed=5)], ids=["greedy", "top", "plain"])
    def test_no_tree_changes_the_text(self, engine: CountingEngine, sampling: Sampling) -> None:
        """Whatever the trees, right or wrong, the tokens are those of plain decoding with the same seed."""
        rng = random.Random(4)
        prompt = self.prompt(engine, rng, 9)
        plain = continuation(engine, 1, prompt, 40, sampling)

        def guess(committed: list[int]) -> DraftTree:
            spine = plain[len(committed) : len(committed) + rng.randrange(6)]
            return random_tree(rng, committed[-1], engine.target.vocabulary_size, 12, spine)

        assert continuation(engine, 2, prompt, 40, sampling, guess) == plain

    def test_the_seed_decides(self, engine: CountingEngine) -> None:
        """The same seed gives the same text, another seed another one."""
        prompt = self.prompt(engine, random.Random(5), 6)
        sampling = Sampling(temperature=1.5, seed=7)
        first = continuation(engine, 1, prompt, 30, sampling)
        assert continuation(engine, 2, prompt, 30, sampling) == first
        assert continuation(engine, 3, prompt, 30, replace(sampling, seed=8)) != first

    def test_nothing_is_computed_twice(self, engine: CountingEngine) -> None:
        """A generation computes of its prompt what no session has computed, and every node once; keeping computes nothing."""
        prompt = self.prompt(engine, random.Random(6), 10)
        plain = continuation(engine, 1, prompt, 20)
        num_known = engine.open(3, prompt, GREEDY)
        engine.release(3)
        assert num_known < len(prompt)
        before, num_nodes = engine.positions_computed, 0

        def guess(committed: list[int]) -> DraftTree:
            nonlocal num_nodes
            tree = random_tree(random.Random(7), committed[-1], engine.target.vocabulary_size, 6, plain[len(committed) :][:3])
            num_nodes += len(tree)
            return tree

        continuation(engine, 2, prompt, 20, guess=guess)
        assert engine.positions_computed - before == len(prompt) - num_known + num_nodes

    def test_a_request_alone_is_the_request_in_a_batch(self, engine: CountingEngine) -> None:
        """Trees and a prefill chunk of several sessions in one step are answered as each of them alone."""
        rng = random.Random(8)
        prompts = [self.prompt(engine, rng, length) for length in (3, 17, 8)]
        samplings = [GREEDY, SAMPLED, Sampling(temperature=1.0, seed=3)]
        vocabulary_size = engine.target.vocabulary_size
        trees = [random_tree(rng, rng.randrange(vocabulary_size), vocabulary_size, size) for size in (1, 13, 6)]
        for session, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            prefill(engine, session, prompt, sampling)
            prefill(engine, 10 + session, prompt, sampling)
        other = self.prompt(engine, rng, 17)
        chunks = [PrefillChunk(session, tuple(other[engine.open(session, other, GREEDY) :]), last=True) for session in (5, 15)]
        alone = [score(engine, session, tree) for session, tree in enumerate(trees)] + list(engine.step(chunks[:1]))
        together = engine.step([*(Scoring(10 + session, tree) for session, tree in enumerate(trees)), chunks[1]])
        assert [posterior.token_ids for posterior in together] == [posterior.token_ids for posterior in alone]

    def test_release_frees_everything(self, engine: CountingEngine) -> None:
        """After release, in whatever state the session was, the engine is as empty as at the start."""
        free = engine.num_free_slots
        engine.open(1, [1, 2, 3], GREEDY)
        root = prefill(engine, 2, [4, 5, 6, 7]).token_ids[-1]
        score(engine, 2, DraftTree((root, 1, 2), (-1, 0, 0)))
        root = prefill(engine, 3, [8, 9]).token_ids[-1]
        tree = DraftTree((root, 1, 2), (-1, 0, 0))
        score(engine, 3, tree)
        engine.keep(3, Acceptance((0, 2), 5))
        assert engine.num_sessions == 3
        assert engine.num_free_slots < free
        for session in (1, 2, 3, 99):
            engine.release(session)
        assert (engine.num_sessions, engine.num_free_slots) == (0, free)

    def test_a_tree_waits_for_the_keep_of_the_last(self, subject: Subject, engine: CountingEngine) -> None:
        """A second tree before the keep is refused, and the session goes on as if it had not been sent."""
        prompt = self.prompt(engine, random.Random(9), 5)
        root = prefill(engine, 1, prompt).token_ids[-1]
        tree = DraftTree((root, 7, 8), (-1, 0, 1))
        score(engine, 1, tree)
        with pytest.raises(ValueError, match="keep"):
            score(engine, 1, tree)
        engine.keep(1, Acceptance((0, 1), 9))
        assert score(engine, 1, DraftTree.lone_root(9)).token_ids == (subject.next_token_id([*prompt, root, 7, 9]),)

    def test_only_a_path_is_kept(self, engine: CountingEngine) -> None:
        """Nodes that are no path from the root, or a keep with no tree, are refused."""
        prefill(engine, 1, [1, 2])
        with pytest.raises(ValueError, match="no tree"):
            engine.keep(1, Acceptance((0,), 1))
        score(engine, 1, DraftTree((3, 4, 5), (-1, 0, 0)))
        for nodes in ((), (1,), (0, 1, 2), (0, 3), (0, -1)):
            with pytest.raises(ValueError, match="no path"):
                engine.keep(1, Acceptance(nodes, 1))
        engine.keep(1, Acceptance((0, 2), 1))

    def test_a_tree_that_is_too_large_is_refused(self, engine: CountingEngine) -> None:
        """The message has the number of nodes and the limit; a tree at the limit is taken."""
        root = prefill(engine, 1, [1, 2]).token_ids[-1]
        with pytest.raises(ValueError, match=rf"{MAX_TREE_NODES + 1}.*{MAX_TREE_NODES}"):
            score(engine, 1, _star(root, MAX_TREE_NODES + 1))
        assert len(score(engine, 1, _star(root, MAX_TREE_NODES)).token_ids) == MAX_TREE_NODES

    def test_a_context_that_is_too_long_is_refused(self, engine: CountingEngine) -> None:
        """The message has the length and the limit; a tree that ends at the limit is taken."""
        with pytest.raises(ValueError, match=rf"{MAX_CONTEXT + 1}.*{MAX_CONTEXT}"):
            engine.open(1, [1] * (MAX_CONTEXT + 1), GREEDY)
        root = prefill(engine, 2, self.prompt(engine, random.Random(10), MAX_CONTEXT - 2)).token_ids[-1]
        with pytest.raises(ValueError, match=rf"{MAX_CONTEXT + 1}.*{MAX_CONTEXT}"):
            score(engine, 2, DraftTree((root, 1, 2), (-1, 0, 1)))
        assert len(score(engine, 2, DraftTree((root, 1, 2), (-1, 0, 0))).token_ids) == 3

    def test_a_wrong_prompt_is_refused(self, engine: CountingEngine) -> None:
        """An empty prompt and a token outside the vocabulary are refused, and nothing stays open."""
        vocabulary_size = engine.target.vocabulary_size
        with pytest.raises(ValueError, match="empty"):
            engine.open(1, [], GREEDY)
        with pytest.raises(ValueError, match=rf"{vocabulary_size}"):
            engine.open(1, [1, vocabulary_size], GREEDY)
        assert engine.num_sessions == 0

    @pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
    def test_8_9_penalties_at_each_node_are_those_of_its_own_path(self, engine: CountingEngine, temperature: float) -> None:
        """With penalties, bias and min tokens no tree changes the text, and a replay of half of it goes on with the rest."""
        prompt = self.prompt(engine, random.Random(12), 9)
        sampling = replace(PENALISED, temperature=temperature)
        plain = continuation(engine, 1, prompt, 40, sampling)
        assert plain != continuation(engine, 2, prompt, 40, replace(GREEDY, temperature=temperature, seed=sampling.seed))
        rng = random.Random(13)

        def guess(committed: list[int]) -> DraftTree:
            spine = plain[len(committed) : len(committed) + rng.randrange(6)]
            return random_tree(rng, committed[-1], engine.target.vocabulary_size, 12, spine)

        assert continuation(engine, 3, prompt, 40, sampling, guess) == plain
        replay = (*prompt, *plain[:20])
        num_known = engine.open(4, replay, sampling, num_output_tokens=20)
        (replayed,) = engine.step([PrefillChunk(4, replay[num_known:], last=True)])
        assert replayed.token_ids[0] == plain[20]

    def test_8_9_min_tokens_counts_tokens_of_each_path(self, subject: Subject, engine: CountingEngine) -> None:
        """The stop token has no chance before that many output tokens, and its full chance from there on, at every depth."""
        prompt = self.prompt(engine, random.Random(14), 5)
        stop = subject.next_token_id(prompt)
        sampling = Sampling(logit_bias=((stop, 100.0),), min_tokens=3, stop_token_ids=(stop,))
        first = prefill(engine, 1, prompt, sampling).token_ids[0]
        assert first != stop
        posterior = score(engine, 1, DraftTree((first, 1, 2, 3, 4), (-1, 0, 1, 2, 1)))
        assert [token == stop for token in posterior.token_ids] == [False, False, True, True, True]

    def test_a_parameter_for_a_token_that_is_not_there_is_refused(self, engine: CountingEngine) -> None:
        """Tokens of logit_bias and stop_token_ids are in the vocabulary, or the session is refused by name."""
        beyond = engine.target.vocabulary_size
        for sampling in (Sampling(logit_bias=((beyond, 1.0),)), Sampling(min_tokens=1, stop_token_ids=(beyond,))):
            with pytest.raises(ValueError, match=f"token is {beyond}|token {beyond}"):
                engine.open(1, [1, 2], sampling)
        assert engine.num_sessions == 0

    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_14_log_probs_are_the_target_s_own(self, engine: CountingEngine, sampling: Sampling) -> None:
        """Log-probs of tokens come from the logits before any processing, probabilities from the processed ones."""
        prompt = self.prompt(engine, random.Random(15), 7)
        root = prefill(engine, 1, prompt, sampling).token_ids[-1]
        posterior = score(engine, 1, DraftTree((root, 1, 2), (-1, 0, 0)))
        other = prefill(engine, 2, [*prompt, root], replace(GREEDY, temperature=1.0))
        assert posterior.distributions is not None
        assert other.distributions is not None
        own = other.distributions.probabilities(0)
        (entry,) = posterior.distributions.log_probs([0], [posterior.token_ids[0]], 3)
        assert entry.log_prob == pytest.approx(math.log(own[posterior.token_ids[0]]), abs=1e-3)
        assert list(entry.top_token_ids) == sorted(range(len(own)), key=lambda token: (-own[token], token))[:3]
        assert posterior.distributions.probabilities(0).sum() == pytest.approx(1.0, abs=1e-5)
        assert posterior.distributions.probabilities(0)[posterior.token_ids[0]] > 0

    def test_chunks_follow_the_prompt(self, engine: CountingEngine) -> None:
        """A chunk of other tokens, a wrong end mark, and a tree before the prompt is complete are refused."""
        engine.open(1, [1, 2, 3, 4], GREEDY)
        wrong = (PrefillChunk(1, (2, 3), False), PrefillChunk(1, (1, 2), True), PrefillChunk(1, (1, 2, 3, 4), False))
        for chunk in wrong:
            with pytest.raises(ValueError, match="chunk"):
                engine.step([chunk])
        with pytest.raises(ValueError, match="0 of 4"):
            score(engine, 1, DraftTree.lone_root(1))
        assert engine.positions_computed == 0

    def test_a_refused_item_harms_no_other(self, engine: CountingEngine) -> None:
        """A step with one item that is refused changes nothing: the others can be sent again."""
        roots = [prefill(engine, session, [1, 2, session]).token_ids[-1] for session in (1, 2)]
        work = [Scoring(session, DraftTree.lone_root(root)) for session, root in zip((1, 2), roots, strict=True)]
        before = engine.num_free_slots, engine.positions_computed
        for culprit in (Scoring(1, DraftTree.lone_root(1)), Scoring(77, DraftTree.lone_root(1))):
            with pytest.raises(ValueError, match=r"session (1|77)"):
                engine.step([*work, culprit])
        assert (engine.num_free_slots, engine.positions_computed) == before
        assert len(engine.step(work)) == 2

    def test_a_session_opens_once(self, engine: CountingEngine) -> None:
        """A second open of a session is refused and the first goes on."""
        engine.open(1, [1, 2], GREEDY)
        with pytest.raises(ValueError, match="open already"):
            engine.open(1, [3], GREEDY)
        assert len(engine.step([PrefillChunk(1, (1, 2), last=True)])[0].token_ids) == 1

    def test_node_probabilities_are_the_likeliest_first(self, engine: CountingEngine) -> None:
        """When asked for, every choice comes with that many tokens, falling log-probs, the greedy choice first."""
        posterior = prefill(engine, 1, [1, 2, 3], num_node_probabilities=4)
        tree = random_tree(random.Random(12), posterior.token_ids[-1], engine.target.vocabulary_size, 7)
        for answered in (posterior, score(engine, 1, tree)):
            assert len(answered.node_probabilities) == len(answered.token_ids)
            for chosen, likely in zip(answered.token_ids, answered.node_probabilities, strict=True):
                assert len(set(likely.token_ids)) == len(likely.log_probs) == 4
                assert likely.token_ids[0] == chosen
                assert list(likely.log_probs) == sorted(likely.log_probs, reverse=True)
                assert likely.log_probs[0] <= 0.0

    @staticmethod
    def prompt(engine: TargetEngine, rng: random.Random, length: int) -> list[int]:
        """Random tokens."""
        return [rng.randrange(engine.target.vocabulary_size) for _ in range(length)]


def _star(root: int, num_nodes: int) -> DraftTree:
    """A root with all other nodes as its children."""
    return DraftTree((root, *range(num_nodes - 1)), (-1, *[0] * (num_nodes - 1)))
