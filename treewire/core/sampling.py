"""This file is how tokens are chosen: the sampling parameters, complete and checked."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters with every default resolved. Temperature 0 is greedy. Raises ValueError with value and limit.

    `shares_noise` says whether the target draws with the noise of `seed`, so that a drafter may aim at its draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=())
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = field(default=())
    shares_noise: bool = True

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("seed", self.seed, 0, 2**64 - 1)
        _check("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        _check("presence_penalty", self.presence_penalty, -100.0, 100.0)
        _check("frequency_penalty", self.frequency_penalty, -100.0, 100.0)
        _check("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.top_p == 0.0:
            raise ValueError("top_p is 0, it must be above 0 and at most 1")
        if self.repetition_penalty == 0.0:
            raise ValueError("repetition_penalty is 0, it must be above 0 and at most 100")

        for token_id, bias in self.logit_bias:
            _check(f"logit_bias of token {token_id}", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """True if no noise is used."""
        return self.temperature == 0.0

    @property
    def truncates(self) -> bool:
        """True if tokens may be left out for being unlikely: by top-k, top-p or min-p."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def reads_history(self) -> bool:
        """True if the chain depends on what was said before."""
        penalties = (self.repetition_penalty != 1.0, self.presence_penalty != 0.0, self.frequency_penalty != 0.0)
        return any(penalties) or self.min_tokens > 0

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raises ValueError if a parameter names a token that the vocabulary lacks."""
        for name, token_ids in (
            ("logit_bias", [token_id for token_id, _ in self.logit_bias]),
            ("stop_token_ids", list(self.stop_token_ids)),
        ):
            for token_id in token_ids:
                _check(f"{name}: token", token_id, 0, vocabulary_size - 1)


def _check(name: str, value: float, lowest: float, highest: float) -> None:
    if not lowest <= value <= highest:  # also catches NaN
        raise ValueError(f"{name} is {value}, it must be from {lowest} to {highest}")
