"""Drafters that read features: what they compute, once, whatever the batch and the chunks; which checkpoints are refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from draft_service.engine import KV_PAGE_SIZE, FeatureReader, Proposal
from draft_service.engines.checkpoints import load_feature_drafter
from draft_service.engines.feature_drafter import FeatureDrafter
from draft_service.engines.ngram import NgramDrafter
from draft_service.engines.ranking import rank_vocabulary
from draft_service.engines.recurrent.model import DraftCache, Ingestion, draft
from draft_service.engines.torch_ranking import SessionNoise, rank
from tests.engines.tiny_drafters import HIDDEN_SIZE, save_dflash, save_recurrent
from tests.engines.tiny_models import VOCABULARY_SIZE, save_tiny_model
from treewire.checkpoint import CALIBRATION, CHECKSUMS, write_branch_weights
from treewire.core.build import BranchWeights, perturb
from treewire.core.noise import noise_row
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals
from treewire.kv.pages import KvExhausted, PagedKv

SAVED: dict[str, Callable[..., Path]] = {"dflash": save_dflash, "recurrent": save_recurrent}
TEXT = [5 + number * 7 % 90 for number in range(60)]
FEATURES: NDArray[np.float32] = np.random.default_rng(0).standard_normal((60, HIDDEN_SIZE)).astype(np.float32)


@pytest.fixture(params=SAVED)
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> FeatureDrafter:
    """An engine of each kind with random weights."""
    return load_feature_drafter(SAVED[request.param](tmp_path / "drafter"), save_tiny_model(tmp_path / "target", "llama"))


def without_pages_of(engine: FeatureDrafter, kv_tokens: int = 512) -> FeatureDrafter:
    """The same network with an empty memory, over the same store."""
    return FeatureDrafter(engine._network, engine.drafter, PagedKv(kv_tokens, KV_PAGE_SIZE))


def propose(engine: FeatureDrafter, session: int, length: int, known: int, *, width: int = 8, horizon: int = 64) -> Proposal:
    """A proposal after the first `length` tokens of the text, with the features from `known` on."""
    features = FEATURES[known : length - 1]
    committed = len(engine._sessions[session].token_ids)
    return Proposal(session, Commit(tuple(TEXT[committed:length]), length), horizon, width, features)


def start(engine: FeatureDrafter, session: int, length: int, sampling: Sampling | None = None) -> None:
    """A session of the first `length` tokens of the text."""
    engine.start(session, TEXT[:length], sampling or Sampling())


def check_same(first: Marginals, second: Marginals) -> None:
    """Equal but for rounding."""
    np.testing.assert_allclose(first.log_probs, second.log_probs, atol=1e-4)
    np.testing.assert_array_equal(first.token_ids[:, 0], second.token_ids[:, 0])


def test_chunks_change_nothing(engine: FeatureDrafter) -> None:
    """Features in chunks ahead of the commit, in one piece with it, or round by round: the same guesses, each position once."""
    start(engine, 1, 30)
    (whole,) = engine.propose([propose(engine, 1, 41, 0)])
    in_chunks = without_pages_of(engine)
    start(in_chunks, 2, 40)
    for first in range(0, 40, 16):
        in_chunks.take_in(2, FEATURES[first : min(first + 16, 40)])
    (chunked,) = in_chunks.propose([propose(in_chunks, 2, 41, 40)])
    by_round = without_pages_of(engine)
    start(by_round, 3, 30)
    for length, known in ((31, 0), (34, 30), (35, 33)):
        by_round.propose([propose(by_round, 3, length, known)])
    (stepped,) = by_round.propose([propose(by_round, 3, 41, 34)])
    check_same(whole, chunked)
    check_same(whole, stepped)
    assert [each.positions_computed for each in (engine, in_chunks, by_round)] == [40, 40, 40]


@pytest.mark.parametrize("chunk", [40, 7])
def test_equal_features_are_computed_once(chunk: int, engine: FeatureDrafter) -> None:
    """A session whose tokens and features equal another's, bit for bit, has its full pages; one with others has none."""
    start(engine, 1, 40)
    (first,) = engine.propose([propose(engine, 1, 41, 0)])
    held, computed = engine.num_free_slots, engine.positions_computed
    start(engine, 2, 40)
    for known in range(0, 40, chunk):
        engine.take_in(2, FEATURES[known : min(known + chunk, 40)])
    (again,) = engine.propose([propose(engine, 2, 41, 40)])
    check_same(first, again)
    assert held - engine.num_free_slots == KV_PAGE_SIZE
    if chunk == 40:
        assert engine.positions_computed - computed == 40 % KV_PAGE_SIZE
    nearly = FEATURES.copy()
    nearly[0, 0] = np.nextafter(nearly[0, 0], np.float32(9))
    start(engine, 3, 40)
    before, computed = engine.num_free_slots, engine.positions_computed
    engine.take_in(3, nearly[:40])
    assert (engine.num_free_slots, engine.positions_computed - computed) == (before, 40)


def test_sessions_without_room_are_refused_and_named(engine: FeatureDrafter) -> None:
    """A start without room for its prompt, a proposal without room for its commit: nothing has changed, others go on."""
    engine = without_pages_of(engine, kv_tokens=96)
    start(engine, 1, 32)
    start(engine, 2, 16)
    with pytest.raises(KvExhausted, match="session 3 needs 64 KV slots, 48 of 96 are free"):
        start(engine, 3, 50)
    assert engine.num_sessions == 2
    for session, length, known in ((1, 33, 0), (2, 17, 0)):
        engine.propose([propose(engine, session, length, known)])
    engine.propose([propose(engine, 1, 59, 32)])
    batch = [propose(engine, 1, 60, 58), propose(engine, 2, 50, 16)]
    with pytest.raises(KvExhausted, match="session 2 needs 48 KV slots, 32 of 96 are free"):
        engine.propose(batch)
    (alone,) = engine.propose(batch[:1])
    assert alone.num_depths == engine.drafter.horizon
    engine.release(1)
    (later,) = engine.propose(batch[1:])
    fresh = without_pages_of(engine)
    start(fresh, 2, 16)
    check_same(later, fresh.propose([propose(fresh, 2, 50, 0)])[0])
    engine.release(2)
    assert engine.num_free_slots == 96


def test_batch_changes_nothing(engine: FeatureDrafter) -> None:
    """Sessions of other lengths, temperatures and depths in one batch: each gets what it gets alone."""
    samplings = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=1.2, seed=4)]
    lengths, horizons = [12, 31, 50], [64, 1, 3]
    alone = []
    for session, (length, sampling, horizon) in enumerate(zip(lengths, samplings, horizons, strict=True)):
        start(engine, session, length - 1, sampling)
        alone += engine.propose([propose(engine, session, length, 0, horizon=horizon)])
    for session, (length, sampling) in enumerate(zip(lengths, samplings, strict=True), start=10):
        start(engine, session, length - 1, sampling)
    together = engine.propose(
        [propose(engine, 10 + number, lengths[number], 0, horizon=horizons[number]) for number in range(3)]
    )
    for first, second in zip(alone, together, strict=True):
        check_same(first, second)
    assert [each.num_depths for each in together] == [engine.drafter.horizon, 1, min(3, engine.drafter.horizon)]


def test_guesses_depend_on_features_and_on_the_bonus_token(engine: FeatureDrafter) -> None:
    """Other features, or another last token, give other guesses."""
    start(engine, 1, 20)
    (first,) = engine.propose([Proposal(1, Commit((7,), 21), 4, 8, FEATURES[:20])])
    start(engine, 2, 20)
    (other_token,) = engine.propose([Proposal(2, Commit((8,), 21), 4, 8, FEATURES[:20])])
    start(engine, 3, 20)
    (other_features,) = engine.propose([Proposal(3, Commit((7,), 21), 4, 8, FEATURES[20:40])])
    assert not np.allclose(first.log_probs, other_token.log_probs, atol=1e-3)
    assert not np.allclose(first.log_probs, other_features.log_probs, atol=1e-3)


def test_missing_and_wrong_features_are_refused(engine: FeatureDrafter) -> None:
    """With the counts; nothing changes, and the right ones are taken afterwards."""
    start(engine, 1, 20)
    with pytest.raises(ValueError, match="features of 19 positions, a sequence of 21 tokens needs them of 20"):
        engine.propose([Proposal(1, Commit((7,), 21), 4, 8, FEATURES[:19])])
    with pytest.raises(ValueError, match=r"shape \[5, 32\], this drafter reads \[positions, 64\]"):
        engine.take_in(1, FEATURES[:5, :32])
    with pytest.raises(ValueError, match="reach position 20, the committed sequence has 20 tokens"):
        engine.take_in(1, FEATURES[:21])
    with pytest.raises(ValueError, match="session 9 has not been started"):
        engine.take_in(9, FEATURES[:5])
    assert engine.propose([Proposal(1, Commit((7,), 21), 4, 8, FEATURES[:20])])[0].width == 8
    engine.release(1)
    assert engine.num_sessions == 0


def test_only_these_engines_read_features(engine: FeatureDrafter) -> None:
    """The service tells by the engine's own methods."""
    assert isinstance(engine, FeatureReader)
    assert engine.drafter.needs_features
    assert not isinstance(NgramDrafter(), FeatureReader)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7, seed=11),
        Sampling(temperature=0.7, seed=11, top_k=35),
        Sampling(temperature=0.7, seed=11, top_p=0.8),
        Sampling(temperature=0.7, seed=11, top_k=40, top_p=0.6, min_p=0.02),
        Sampling(temperature=0.7, seed=11, min_p=0.05),
    ],
)
def test_ranking_is_that_of_the_other_engines(sampling: Sampling) -> None:
    """On torch as in numpy: the same tokens in the same order with the same log-probs, equals by the lower token id; top-k,
    top-p and min-p leave the same ones."""
    logits = np.random.default_rng(1).standard_normal((3, VOCABULARY_SIZE)).astype(np.float32)
    logits[:, 10:40] = logits[:, 40:70]  # many equals
    noise = SessionNoise(sampling, VOCABULARY_SIZE, None, BranchWeights(1.0, 1.0))
    ranked = rank(torch.from_numpy(logits), [noise] * 3, [4, 5, 9], 20)
    for row, position in enumerate((4, 5, 9)):
        expected = rank_vocabulary(logits[row], sampling, position, 20)
        np.testing.assert_array_equal(ranked.token_ids[row].numpy(), expected.token_ids)
        np.testing.assert_allclose(ranked.log_probs[row].numpy(), expected.log_probs, atol=1e-5)


def test_ranking_by_weights() -> None:
    """What log-prob and noise count is the drafter's own, half as much at temperature 0.5; greedy rows rank by log-prob."""
    logits = np.random.default_rng(1).standard_normal((2, VOCABULARY_SIZE)).astype(np.float32)
    noise = SessionNoise(Sampling(temperature=0.5, seed=3), VOCABULARY_SIZE, None, BranchWeights(0.8, 3.0))
    ranked = rank(torch.from_numpy(logits), [noise, SessionNoise(Sampling(), VOCABULARY_SIZE, None)], [4, 4], 20)
    scores = 0.4 * 2.0 * logits[0] + 1.5 * noise_row(3, 4, VOCABULARY_SIZE)
    assert ranked.token_ids[0].tolist() == np.argsort(-scores, kind="stable")[:20].tolist()
    assert ranked.token_ids[1].tolist() == np.argsort(-logits[1], kind="stable")[:20].tolist()


def test_drafters_do_not_aim_at_noise_that_the_target_does_not_draw_with() -> None:
    """As under hybrid acceptance: tokens rank by log-prob alone, or a tree's shape would depend on the target's draws."""
    logits = np.random.default_rng(2).standard_normal((1, VOCABULARY_SIZE)).astype(np.float32)
    sampling = Sampling(temperature=1.5, seed=11, shares_noise=False)
    ranked = rank(torch.from_numpy(logits), [SessionNoise(sampling, VOCABULARY_SIZE, None)], [4], 20)
    assert ranked.token_ids[0].tolist() == np.argsort(-logits[0], kind="stable")[:20].tolist()


def test_noise_of_candidates_is_theirs_in_the_whole_row() -> None:
    """A drafter that guesses some tokens alone ranks them with the noise that the target adds to them."""
    candidates = torch.tensor([3, 5, 50, 96])
    row = SessionNoise(Sampling(temperature=1.0, seed=5), VOCABULARY_SIZE, candidates).at(12)
    assert row is not None
    np.testing.assert_array_equal(row.numpy(), noise_row(5, 12, VOCABULARY_SIZE)[candidates.numpy()])


def rewrite(folder: Path, **changes: Any) -> Path:
    """The checkpoint with another config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "candidate selector .* conditional marginals"),
        ({"dflash_config": {"selector_rank": 8}}, "candidate selector"),
        ({"architectures": ["LlamaForCausalLM"]}, "architecture is 'LlamaForCausalLM', known are DFlashDraftModel"),
        ({"model_type": "mamba"}, "model_type is 'mamba', block drafters are qwen3 or llama"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layers of type linear_attention"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rotary scaling is 'dynamic'"),
        ({"block_size": 1}, "block size is 1"),
        (
            {"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 1]}},
            "mask token is 97, the target has tokens up to 96",
        ),
        ({"num_hidden_layers": 3}, "lacks the tensors"),
        ({"intermediate_size": 128}, "does not have the shape that its config says"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0]}}, r"fc.weight has shape \[64, 128\], 1 taps of 64"),
    ],
)
def test_checkpoints_that_cannot_be_run_are_refused(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    """At loading, with the reason."""
    target = save_tiny_model(tmp_path / "target", "llama")
    with pytest.raises(ValueError, match=complaint):
        load_feature_drafter(rewrite(save_dflash(tmp_path / "drafter"), **changes), target)


@pytest.mark.parametrize("kind", SAVED)
def test_weights_beside_a_checkpoint_are_the_drafter_s(kind: str, tmp_path: Path) -> None:
    """What calibration left is what it ranks by, and says; the checksums beside it, if there are any, tell it too."""
    target, drafter = save_tiny_model(tmp_path / "target", "llama"), SAVED[kind](tmp_path / "drafter")
    assert load_feature_drafter(drafter, target).drafter.weights is None
    (drafter / CHECKSUMS).write_text("0  config.json\n1  model.safetensors\n")
    for weights in (BranchWeights(0.3, 0.9), BranchWeights(0.4, 0.8)):
        path = write_branch_weights(drafter, weights)
        assert load_feature_drafter(drafter, target).drafter.weights == weights
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert (drafter / CHECKSUMS).read_text() == f"{digest}  {CALIBRATION}\n0  config.json\n1  model.safetensors\n"
    told = BranchWeights(1.0, 0.0)
    assert load_feature_drafter(drafter, target, weights=told).drafter.weights == told


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("0.5", "is no calibration with log_prob_weight and noise_weight"),
        ("{", "is no calibration"),
        ('{"log_prob_weight": 0.5}', "noise_weight"),
        ('{"log_prob_weight": 0, "noise_weight": 1}', "log_prob_weight is 0.0, it must be above 0 and at most 10"),
        ('{"log_prob_weight": 1, "noise_weight": NaN}', "noise_weight is nan, it must be from 0 to 10"),
        ('{"log_prob_weight": 1, "noise_weight": "much"}', "is no calibration"),
    ],
)
def test_malformed_weights_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    """At loading, with the file and what is wrong with it."""
    target, drafter = save_tiny_model(tmp_path / "target", "llama"), save_recurrent(tmp_path / "drafter")
    (drafter / CALIBRATION).write_text(text)
    with pytest.raises(ValueError, match=complaint) as refusal:
        load_feature_drafter(drafter, target)
    assert str(drafter / CALIBRATION) in str(refusal.value)


@pytest.mark.parametrize(
    ("kind", "options", "complaint"),
    [
        ("dflash", {"dtype": "int8"}, "dtype is 'int8', this drafter takes auto, float32, bfloat16, float16"),
        ("recurrent", {"dtype": "float16"}, "dtype is 'float16', this drafter takes auto, float32, int8"),
        ("recurrent", {"device": "cuda"}, "device is 'cuda', recurrent drafters run on a CPU"),
    ],
)
def test_types_and_devices_that_a_drafter_does_not_take_are_refused(
    kind: str, options: dict[str, str], complaint: str, tmp_path: Path
) -> None:
    """At loading, with what it takes."""
    target = save_tiny_model(tmp_path / "target", "llama")
    with pytest.raises(ValueError, match=complaint):
        load_feature_drafter(SAVED[kind](tmp_path / "drafter"), target, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "dtype"), [("dflash", "bfloat16"), ("recurrent", "int8")])
def test_coarser_weights_guess_nearly_the_same(kind: str, dtype: str, tmp_path: Path) -> None:
    """Half the bytes, or a quarter, and log-probs that are off by little."""
    target, drafter = save_tiny_model(tmp_path / "target", "llama"), SAVED[kind](tmp_path / "drafter")
    (exact,) = _guess(load_feature_drafter(drafter, target))
    (coarse,) = _guess(load_feature_drafter(drafter, target, dtype=dtype))
    first = dict(zip(exact.token_ids[0].tolist(), exact.log_probs[0].tolist(), strict=True))
    second = dict(zip(coarse.token_ids[0].tolist(), coarse.log_probs[0].tolist(), strict=True))
    shared = set(first) & set(second)
    assert len(shared) >= 4
    assert max(abs(first[token_id] - second[token_id]) for token_id in shared) < 0.5


def test_drafter_for_a_target_of_another_size_is_refused(tmp_path: Path) -> None:
    """Both sizes are told."""
    target = save_tiny_model(tmp_path / "target", "llama", hidden_size=32)
    with pytest.raises(ValueError, match="hidden size 64, its target's embedding has 32"):
        load_feature_drafter(save_dflash(tmp_path / "drafter"), target)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head_are_the_targets(tied: bool, tmp_path: Path) -> None:
    """Tied or not, in one file or in several."""
    target = save_tiny_model(tmp_path / "target", "qwen3", tie_word_embeddings=tied)
    drafter = save_dflash(tmp_path / "drafter")
    (whole,) = _guess(load_feature_drafter(drafter, target))
    tensors = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[half::2]) for half in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, target / f"part-{number}.safetensors")
    weight_map = {name: f"part-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (parts,) = _guess(load_feature_drafter(drafter, target))
    check_same(whole, parts)


def _guess(engine: FeatureDrafter) -> Sequence[Marginals]:
    start(engine, 1, 20)
    return engine.propose([propose(engine, 1, 21, 0)])


BEAM = 3
SAMPLINGS = [Sampling(), Sampling(temperature=0.9, seed=5)]


@pytest.fixture
def beamed(tmp_path: Path) -> FeatureDrafter:
    """A recurrent drafter that describes BEAM prefixes at each depth."""
    return load_feature_drafter(save_recurrent(tmp_path / "drafter"), save_tiny_model(tmp_path / "target", "llama"), beam=BEAM)


def beam_proposal(engine: FeatureDrafter, session: int, length: int, known: int, **options: Any) -> Proposal:
    """A proposal whose answer may have conditional rows."""
    return replace(propose(engine, session, length, known, **options), takes_conditional=True)


def rows_of(marginals: Marginals) -> dict[tuple[int, ...], tuple[NDArray[np.int32], NDArray[np.float32]]]:
    """What each prefix with a conditional row is followed by."""
    return {
        prefix: (marginals.token_ids[row], marginals.log_probs[row])
        for row, prefix in enumerate(marginals.prefixes, start=marginals.num_depths)
    }


def test_conditional_rows_are_those_of_a_beam_search(beamed: FeatureDrafter) -> None:
    """Prefixes and their rows equal those of the beam search that training evaluates with."""
    start(beamed, 1, 20)
    (marginals,) = beamed.propose([beam_proposal(beamed, 1, 21, 0)])
    model, features = beamed._network._model, torch.from_numpy(FEATURES[:20])
    preceding = torch.cat([torch.zeros(1, HIDDEN_SIZE), features])
    (drafted,) = draft(
        model, [Ingestion(DraftCache(model.config), torch.tensor(TEXT[:21]), preceding)], horizon=4, width=8, beam=BEAM
    )
    paths: list[tuple[int, ...]] = [()]
    for token_id, parent in zip(drafted.token_ids[1:], drafted.parents[1:], strict=True):
        paths.append((*paths[parent], token_id))
    for depth in range(4):
        nodes = [node for node, path in enumerate(paths) if len(path) == depth]
        assert len(nodes) == (BEAM if depth else 1)
        np.testing.assert_allclose(marginals.log_probs[depth], drafted.child_log_probs[nodes[0]], atol=1e-4)
        for node in nodes[1:]:
            token_ids, log_probs = rows_of(marginals)[paths[node]]
            np.testing.assert_allclose(log_probs, drafted.child_log_probs[node], atol=1e-4)
            np.testing.assert_array_equal(token_ids, drafted.child_ids[node])
    assert len(marginals.prefixes) == (BEAM - 1) * 3 == beamed.drafter.max_prefixes


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_prefixes_are_those_that_trees_are_made_of(sampling: Sampling, beamed: FeatureDrafter) -> None:
    """At each depth the described prefixes have the highest branch scores among the children of those described before."""
    start(beamed, 1, 20, sampling)
    (marginals,) = beamed.propose([beam_proposal(beamed, 1, 21, 0)])
    scores = marginals.log_probs.astype(np.float64)
    if not sampling.is_greedy:
        scores = perturb(marginals, sampling.seed, 20)
        scores = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    conditional = {prefix: row for row, prefix in enumerate(marginals.prefixes, start=marginals.num_depths)}
    described = {(): 0.0}
    for depth in range(1, marginals.num_depths):
        offered = sorted(
            (
                (score + scores[row, rank], (*path, int(marginals.token_ids[row, rank])))
                for path, score in described.items()
                for row in [conditional.get(path, depth - 1)]
                for rank in range(marginals.width)
            ),
            reverse=True,
        )
        described = {path: score for score, path in offered[:BEAM]}
        best, *others = described
        assert best not in conditional
        assert {path for path in conditional if len(path) == depth} == set(others)


def test_beams_change_nothing_in_a_batch_or_for_others(beamed: FeatureDrafter) -> None:
    """Sessions with and without conditional rows together: each gets what it gets alone, and again in the next round."""
    samplings = [*SAMPLINGS, Sampling(temperature=1.2, seed=6)]
    takes = [True, True, False]
    alone = []
    for session, (sampling, conditional) in enumerate(zip(samplings, takes, strict=True)):
        start(beamed, session, 20 + session, sampling)
        for length, known in ((21 + session, 0), (24 + session, 20 + session)):
            proposal = replace(propose(beamed, session, length, known), takes_conditional=conditional)
            alone.append(beamed.propose([proposal])[0])
    for session, sampling in enumerate(samplings):
        start(beamed, 10 + session, 20 + session, sampling)
    together = []
    for step, known in ((1, 0), (4, 20)):
        together.append(
            beamed.propose(
                [
                    replace(
                        propose(beamed, 10 + session, 20 + session + step, known and known + session),
                        takes_conditional=takes[session],
                    )
                    for session in range(3)
                ]
            )
        )
    for session in range(3):
        for turn in range(2):
            first, second = alone[2 * session + turn], together[turn][session]
            check_same(first, second)
            assert first.prefixes == second.prefixes
            assert bool(first.prefixes) == takes[session]


def test_chains_and_single_depths_have_no_conditional_rows(beamed: FeatureDrafter) -> None:
    """One token a row leaves one prefix a depth; one depth is that of the root's children alone."""
    start(beamed, 1, 20)
    (chain,) = beamed.propose([beam_proposal(beamed, 1, 21, 0, width=1)])
    assert (chain.num_depths, chain.prefixes) == (4, ())
    (single,) = beamed.propose([beam_proposal(beamed, 1, 22, 20, horizon=1)])
    assert (single.num_depths, single.prefixes) == (1, ())


@pytest.mark.parametrize(
    ("kind", "beam", "complaint"),
    [
        ("dflash", 4, "beam is 4, a block drafter guesses every depth at once"),
        ("recurrent", 0, "beam is 0, it must be at least 1"),
    ],
)
def test_beams_that_a_drafter_does_not_have_are_refused(kind: str, beam: int, complaint: str, tmp_path: Path) -> None:
    """At loading, with the reason."""
    target = save_tiny_model(tmp_path / "target", "llama")
    with pytest.raises(ValueError, match=complaint):
        load_feature_drafter(SAVED[kind](tmp_path / "drafter"), target, beam=beam)
