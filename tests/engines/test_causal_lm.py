"""The causal language model as drafter: a plain forward's log-probs, each position computed once, a state that stays clean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM

from draft_service.engine import Proposal
from draft_service.engines.causal_lm import CausalLMDrafter
from treewire.core.noise import noise_row
from treewire.core.processing import process
from treewire.core.sampling import Sampling
from treewire.core.tree import Commit, Marginals

VOCABULARY_SIZE = 97
PROMPT = (5, 17, 40, 8, 3)
GREEDY = Sampling()
SAMPLED = Sampling(temperature=0.9, top_k=30, top_p=0.95, seed=21)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny random Llama, peaked enough that its best tokens are apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def drafter(model: LlamaForCausalLM) -> CausalLMDrafter:
    """A drafter without sessions."""
    return CausalLMDrafter(model, "tiny", horizon=4, width=6)


@torch.inference_mode()
def plain_log_probs(model: LlamaForCausalLM, token_ids: Sequence[int], sampling: Sampling) -> NDArray[np.float32]:
    """Log-probs of the token after these, [vocabulary], by one plain forward without a cache."""
    logits: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[:, -1]
    log_probs: NDArray[np.float32] = logits.log_softmax(-1).numpy()
    row: NDArray[np.float32] = (log_probs if sampling.is_greedy else process(logits.numpy(), sampling))[0]
    return row


def assert_marginals_follow(
    model: LlamaForCausalLM, prefix: Sequence[int], marginals: Marginals, sampling: Sampling, num_depths: int
) -> None:
    """Each row is the best of a plain forward on the prefix and the best tokens of the rows before."""
    assert marginals.num_depths == num_depths
    path = list(prefix)
    for token_ids, log_probs in zip(marginals.token_ids, marginals.log_probs, strict=True):
        plain = plain_log_probs(model, path, sampling)
        noise = 0.0 if sampling.is_greedy else noise_row(sampling.seed, len(path), VOCABULARY_SIZE)
        assert token_ids.tolist() == np.argsort(-(plain + noise), kind="stable")[: len(token_ids)].tolist()
        np.testing.assert_allclose(log_probs, plain[token_ids], atol=1e-4)
        path.append(int(token_ids[0]))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_marginals_are_those_of_a_plain_forward(model: LlamaForCausalLM, drafter: CausalLMDrafter, sampling: Sampling) -> None:
    """Round after round, whatever was committed, rows equal the plain forward on prefix and path."""
    drafter.start(1, PROMPT, sampling)
    committed = list(PROMPT)
    for token_ids in [(9,), (12, 60, 33), (4,), (70, 71, 72, 73, 74)]:
        committed.extend(token_ids)
        (marginals,) = drafter.propose([Proposal(1, Commit(token_ids, len(committed)), 4, 6)])
        assert_marginals_follow(model, committed, marginals, sampling, num_depths=4)


def test_the_prompt_and_each_commit_are_computed_once(drafter: CausalLMDrafter) -> None:
    """Positions computed: the prompt at start, then each round its committed tokens and horizon - 1 of the path."""
    drafter.start(1, PROMPT, GREEDY)
    assert drafter.positions_computed == len(PROMPT)
    drafter.propose([Proposal(1, Commit((9,), 6), 4, 6)])
    assert drafter.positions_computed == len(PROMPT) + 1 + 3
    drafter.propose([Proposal(1, Commit((12, 60, 33), 9), 2, 6)])
    assert drafter.positions_computed == len(PROMPT) + 1 + 3 + 3 + 1
    drafter.propose([Proposal(1, Commit((4,), 10), 0, 6)])
    assert drafter.positions_computed == len(PROMPT) + 1 + 3 + 3 + 1 + 1


def test_a_session_of_many_rounds_is_a_fresh_session(drafter: CausalLMDrafter) -> None:
    """Nothing of the dropped paths stays: a session that begins with the same text guesses the same."""
    drafter.start(1, PROMPT, GREEDY)
    committed = list(PROMPT)
    for step in range(20):
        committed.append(3 * step + 1)
        (old,) = drafter.propose([Proposal(1, Commit((committed[-1],), len(committed)), 4, 6)])
    drafter.start(2, committed[:-1], GREEDY)
    (fresh,) = drafter.propose([Proposal(2, Commit((committed[-1],), len(committed)), 4, 6)])
    np.testing.assert_array_equal(old.token_ids, fresh.token_ids)
    np.testing.assert_allclose(old.log_probs, fresh.log_probs, atol=1e-4)


def test_a_session_alone_is_the_session_in_a_batch(model: LlamaForCausalLM, drafter: CausalLMDrafter) -> None:
    """Seeded drafts are bit for bit the same in any batch."""
    prompts = {1: PROMPT, 2: (8, 9), 3: tuple(range(20))}
    for session, prompt in prompts.items():
        drafter.start(session, prompt, SAMPLED)
    proposals = {session: Proposal(session, Commit((50,), len(prompt) + 1), 4, 6) for session, prompt in prompts.items()}
    for session, together in zip(prompts, drafter.propose(list(proposals.values())), strict=True):
        single = CausalLMDrafter(model, "tiny", horizon=4, width=6)
        single.start(session, prompts[session], SAMPLED)
        (alone,) = single.propose([proposals[session]])
        np.testing.assert_array_equal(together.token_ids, alone.token_ids)
        np.testing.assert_array_equal(together.log_probs, alone.log_probs)


def test_a_failed_round_can_come_again(
    model: LlamaForCausalLM, drafter: CausalLMDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model fails in the middle of a commit, the session is as before it."""
    drafter.start(1, PROMPT, GREEDY)
    proposal = Proposal(1, Commit((9, 10), 7), 4, 6)
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[1].mlp, "forward", _fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            drafter.propose([proposal])
    (marginals,) = drafter.propose([proposal])
    assert_marginals_follow(model, (*PROMPT, 9, 10), marginals, GREEDY, num_depths=4)


def test_drafting_stops_at_the_models_context(model: LlamaForCausalLM, drafter: CausalLMDrafter) -> None:
    """Rows end where the next token would be the 65th; a sequence of 64 tokens gets none."""
    text = [token % VOCABULARY_SIZE for token in range(3, 67)]
    drafter.start(1, text[:61], GREEDY)
    (marginals,) = drafter.propose([Proposal(1, Commit((text[61],), 62), 4, 6)])
    assert_marginals_follow(model, text[:62], marginals, GREEDY, num_depths=2)
    (marginals,) = drafter.propose([Proposal(1, Commit(tuple(text[62:]), 64), 4, 6)])
    assert marginals.num_depths == 0
    drafter.release(1)
    drafter.release(1)
    assert drafter.num_sessions == 0


def test_a_checkpoint_is_loaded_from_safetensors(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """A saved model drafts as the model in memory, and says what it is."""
    model.save_pretrained(tmp_path)
    drafter = CausalLMDrafter.load(str(tmp_path), horizon=3, width=5, tokenizer_hash="abc")
    says = drafter.drafter
    assert (says.engine, says.vocabulary_size, says.tokenizer_hash, says.max_context) == ("causal_lm", 97, "abc", 64)
    drafter.start(1, PROMPT, GREEDY)
    (marginals,) = drafter.propose([Proposal(1, Commit((9,), 6), 4, 6)])
    assert marginals.width == 5
    assert_marginals_follow(model, (*PROMPT, 9), marginals, GREEDY, num_depths=3)


def test_pickled_weights_are_refused(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """Weights in torch's pickle format are not loaded."""
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        CausalLMDrafter.load(str(tmp_path))


def test_models_whose_state_cannot_be_cut_are_refused(model: LlamaForCausalLM) -> None:
    """A sliding window and a recurrent state are named; so is a width past the vocabulary, and a dtype that is none."""
    small = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 1}
    mistral = MistralConfig(**small, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2, sliding_window=8)
    with pytest.raises(ValueError, match="DynamicSlidingWindowLayer, which cannot be cut back"):
        CausalLMDrafter(MistralForCausalLM(mistral), "windowed")
    with pytest.raises(ValueError, match="LinearAttentionLayer, which cannot be cut back"):
        CausalLMDrafter(MambaForCausalLM(MambaConfig(**small, state_size=4)), "recurrent")
    with pytest.raises(ValueError, match="width at most 97"):
        CausalLMDrafter(model, "tiny", width=98)
    for dtype in ("int8", "float31"):
        with pytest.raises(ValueError, match=f"dtype is '{dtype}'"):
            CausalLMDrafter.load("tiny", dtype=dtype)


def _fail(*_: object) -> None:
    raise RuntimeError("out of memory")
