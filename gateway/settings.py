"""This file is what the gateway can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, model_validator

from gateway.replicas import DNS
from treewire.core.build import LARGEST_WEIGHT, USUAL_WEIGHTS
from treewire.runtime.settings import Address, Endpoint, OptionalAddress, ServiceSettings
from treewire.runtime.tls import Certificates


def _checked_upstream(text: str) -> str:
    if text.startswith(DNS):
        return DNS + str(Endpoint.parse(text.removeprefix(DNS)))
    return str(Endpoint.parse(text))


Upstream = Annotated[str, AfterValidator(_checked_upstream)]
"""A setting that holds the address of one replica, or the name of several."""


class GatewaySettings(ServiceSettings):
    """Settings of the gateway. Flags are the names with dashes, environment variables TREEWIRE_GATEWAY_NAME."""

    service: ClassVar[str] = "gateway"

    bind: Address = Field(
        "127.0.0.1:50050", description="Where to listen: host:port, [ipv6]:port or unix:/path; port 0 is any."
    )
    http_bind: OptionalAddress = Field(
        "", description="Where to serve the OpenAI-compatible HTTP; empty is off, port 0 is any."
    )
    verify: tuple[Upstream, ...] = Field(
        ("127.0.0.1:50052",), description="Replicas of the verify service: addresses, or dns:///name:port."
    )
    draft: tuple[Upstream, ...] = Field(
        ("127.0.0.1:50051",), description="Replicas of the draft service, likewise; empty decodes without drafts."
    )
    model: str = Field("smollm2-135m", description="Whose tokenizer: alias, directory, hub id, or simulated.")
    budget: Literal["auto"] | NonNegativeInt = Field(
        "auto",
        description="Nodes of a draft tree, root excluded, when a request sets none; 0 drafts nothing; auto chooses in each "
        "round by the drafter's record and the target's prices, and is 8 for a target that tells none.",
    )
    adaptive_budget: int = Field(64, ge=1, le=4096, description="Most nodes of a tree whose budget is auto.")
    max_budget: int = Field(256, ge=0, le=4096, description="Largest budget that a request may ask for.")
    horizon: int = Field(16, ge=1, le=64, description="Deepest depth that the drafter is asked for.")
    width: int = Field(64, ge=1, le=256, description="Tokens a depth that the drafter is asked for.")
    feature_bytes: int = Field(
        64 * 2**20, ge=2**20, description="Context features kept of a generation, in bytes, for a drafter that comes back."
    )
    max_tokens: int = Field(512, ge=1, description="Tokens to generate at most, when a request sets none.")
    temperature: float = Field(0.0, ge=0, le=100, description="Temperature when a request sets none; 0 is greedy.")
    log_prob_weight: float | None = Field(
        None,
        gt=0,
        le=LARGEST_WEIGHT,
        description="Weight of a draft's log-probability where noise ranks branches, at temperature 1; unset is what treewire "
        f"calibrate left beside the drafter, else {USUAL_WEIGHTS.log_prob}.",
    )
    noise_weight: float | None = Field(
        None,
        ge=0,
        le=LARGEST_WEIGHT,
        description="Weight of the shared noise in the ranking of branches; unset is what treewire calibrate left beside the "
        f"drafter, else {USUAL_WEIGHTS.noise}.",
    )
    max_prompt_characters: int = Field(1_000_000, ge=1, description="Longest prompt, in characters.")
    max_prompt_tokens: int | None = Field(None, ge=1, description="Longest prompt, in tokens; unset is the target's context.")
    max_output_tokens: int | None = Field(None, ge=1, description="Most tokens that a request may ask for; unset has no limit.")
    max_running: int = Field(256, ge=1, description="Generations that run at once.")
    max_queued: int = Field(256, ge=0, description="Generations that may wait for a place.")
    max_wait_seconds: float = Field(30.0, gt=0, description="Longest wait for a place.")
    draft_timeout_seconds: float = Field(2.0, gt=0, description="Longest wait for a draft before the round goes without.")
    prefill_timeout_seconds: float = Field(300.0, gt=0, description="Longest wait for a prefill.")
    verify_timeout_seconds: float = Field(60.0, gt=0, description="Longest wait for the verification of a tree.")
    failover_attempts: int = Field(8, ge=1, description="Replicas that are tried for a generation whose own one was lost.")
    failover_seconds: float = Field(30.0, gt=0, description="Longest wait for a replica that serves.")
    preempted_seconds: float = Field(600.0, gt=0, description="Longest wait of a running generation for room on a target.")
    target_timeout_seconds: float = Field(600.0, gt=0, description="Longest wait for the verify service at the start.")
    upstream_ca_file: Path | None = Field(None, description="PEM authorities of the services; turns TLS towards them on.")
    upstream_certificate_file: Path | None = Field(None, description="PEM certificate chain to show to the services.")
    upstream_key_file: Path | None = Field(None, description="PEM private key of that certificate.")
    trace_endpoint: str = Field("", description="OTLP collector for spans of generations, http://host:port; empty is off.")

    @model_validator(mode="after")
    def _check_verify(self) -> Self:
        if not self.verify:
            raise ValueError("verify is empty, a gateway needs a target")
        return self

    @model_validator(mode="after")
    def _check_upstream_tls(self) -> Self:
        if (self.upstream_certificate_file is None) != (self.upstream_key_file is None):
            raise ValueError("upstream_certificate_file and upstream_key_file go together: one is missing")
        if self.upstream_certificate_file is not None and self.upstream_ca_file is None:
            raise ValueError("upstream_certificate_file needs upstream_ca_file")
        return self

    @model_validator(mode="after")
    def _check_http_exposure(self) -> Self:
        if self.http_bind:
            if self.http_listen.path:
                raise ValueError(f"http_bind is {self.http_bind}, HTTP is served over TCP")
            self.check_exposure("http_bind", self.http_listen)
        return self

    @property
    def http_listen(self) -> Endpoint:
        """`http_bind`, parsed."""
        return Endpoint.parse(self.http_bind)

    @property
    def upstream_certificates(self) -> Certificates | None:
        """What the services must be, and what they are shown; None speaks clear text with them."""
        if self.upstream_ca_file is None:
            return None
        return Certificates(self.upstream_certificate_file, self.upstream_key_file, self.upstream_ca_file)
