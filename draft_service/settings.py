"""This file is what the draft service can be told."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from draft_service.engine import KV_PAGE_SIZE, KV_TOKENS
from treewire.runtime.settings import Address, ServiceSettings


class DraftSettings(ServiceSettings):
    """Settings of the draft service. Flags are the names with dashes, environment variables TREEWIRE_DRAFT_NAME."""

    service: ClassVar[str] = "draft"

    bind: Address = Field(
        "127.0.0.1:50051", description="Where to listen: host:port, [ipv6]:port or unix:/path; port 0 is any."
    )
    engine: Literal["ngram", "causal-lm", "dflash", "simulated"] = Field("ngram", description="What guesses.")
    model: str = Field("", description="Alias, directory or hub id of the drafter's model; causal-lm and dflash.")
    target: str = Field(
        "", description="Whose embedding and output head the drafter shares: as the target's model; dflash only."
    )
    device: str = Field("cpu", description="PyTorch device of the drafter; causal-lm and dflash.")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "int8"] = Field(
        "auto", description="Type of the drafter's weights; auto is int8 for recurrent drafters on a CPU; dflash only."
    )
    threads: int = Field(1, ge=0, description="CPU threads of the drafter; 0 is one a core; causal-lm and dflash.")
    horizon: int = Field(8, ge=1, le=64, description="Deepest depth that is guessed at; for dflash its own if not set.")
    width: int = Field(16, ge=1, le=256, description="Tokens guessed at each depth; for dflash 64 if not set.")
    beam: int | None = Field(
        None,
        ge=1,
        le=16,
        description="Prefixes guessed from at each depth, all but one in conditional rows; recurrent drafters; unset is 4.",
    )
    kv_tokens: int = Field(
        KV_TOKENS,
        ge=16,
        description="Token positions whose keys and values fit in memory, all sessions together; causal-lm and dflash.",
    )
    kv_page_size: Literal[1, 8, 16] = Field(
        KV_PAGE_SIZE, description="Token positions in a page of KV memory; prefixes are shared by whole pages."
    )
    max_sessions: int = Field(256, ge=1, description="Sessions that may be open at once.")
    max_batch_size: int = Field(64, ge=1, description="Sessions that one step of the drafter serves.")
    max_queue_length: int = Field(1024, ge=1, description="Proposals that may wait for a step.")
    simulated_seed: int = Field(0, ge=0, description="Which simulated language; simulated engine only.")
    simulated_agreement: float = Field(
        0.8, ge=0, le=1, description="How often the guess is the target's; simulated engine only."
    )
    simulated_step_seconds: float = Field(0.0, ge=0, description="Least duration of a step; simulated engine only.")
