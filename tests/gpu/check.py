"""The target's step on this machine's GPU: graphs against eager runs, attention against its reference, and what steps take.

`python -m tests.gpu.check [--device cpu] [--output FILE]` prints what it finds and exits with 1 if a check fails. On a CPU it
runs small shapes without graphs. Weights are random, in the shapes of real models; nothing is fetched.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.machine import provenance
from tests.attention_cases import RATIOS, Case
from tests.engines.target_contract import random_tree
from tests.gpu.shapes import SHAPES, RandomWeights
from tests.system.local_stack import verify_server
from treewire import wire
from treewire.core.acceptance import Acceptance, accept
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.kv.pages import PAGE_SIZES, PagedKv
from treewire.kv.store import KvStore
from treewire.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.attention.backends import AttentionKind, AttentionPlace, check_attention, make_attention
from verify_service.attention.bucket import BucketShape, Heads
from verify_service.attention.tree_attention import TreeAttention
from verify_service.engine import Posterior, PrefillChunk, Scoring, Target, Unsupported
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.choices import WholeRows
from verify_service.engines.transformers.lean import PRECISIONS, LeanForward
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.runner import LocalRunner, Runner
from verify_service.engines.transformers.static_step import BATCH_SIZES, NUM_NODES, StaticOptions, StaticRunner

_TIMED_BATCH_SIZES = (1, 8)
_KINDS: tuple[AttentionKind, ...] = ("sdpa", "triton", "flashinfer")
_MEMORY_BOUND = 1.25  # a step that takes more than this times plain decoding's is no longer bound by reading the weights
_NEAR_TIE = 1e-2  # two log-probs so close may change places between kernels
_ATTENTION_TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Scale:
    """How much is tried. `context` is the tokens before the trees; `head_size` that of attention by itself."""

    equality_model: str
    timed_models: tuple[str, ...]
    dtype: str
    context: int
    trees: tuple[int, ...]
    num_repeats: int
    head_size: int


GPU = Scale("qwen3-0.6b", ("qwen3-0.6b", "qwen3-8b"), "bfloat16", 500, (16, 64, 128, 256, 512), 20, 128)
CPU = Scale("small", ("small",), "float32", 40, (16, 64), 3, 16)


@dataclass
class Report:
    """What was found; `failures` are the checks that did not hold, `left_out` is attention that cannot be had here."""

    machine: dict[str, Any]
    checks: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    step_times: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    host_milliseconds: dict[str, float] = field(default_factory=dict)
    round_milliseconds: dict[str, float] = field(default_factory=dict)
    service_milliseconds: dict[str, float] = field(default_factory=dict)

    def check(self, name: str, holds: bool, finding: str) -> None:
        """Note a check, and show it."""
        self.checks[name] = finding
        if not holds:
            self.failures.append(name)
        print(f"{'ok    ' if holds else 'FAILED'} {name}: {finding}", flush=True)


@dataclass(frozen=True, eq=False)
class Model:
    """A forward of random weights whose store has room for eight contexts and trees, and one slot that fills buckets."""

    forward: LeanForward
    vocabulary_size: int
    context: int

    @classmethod
    def of(cls, shape: str, dtype: str, device: str, context: int) -> Model:
        """In the shape of that name."""
        config = SHAPES[shape]
        architecture = Architecture.from_config(config)
        num_slots = max(BATCH_SIZES) * (context + max(NUM_NODES)) + 1  # one fills buckets
        weights = RandomWeights(config, device, PRECISIONS[dtype].dtype)
        forward = LeanForward(architecture, weights, PRECISIONS[dtype], TreeAttention(KvStore(num_slots)), device)
        return cls(forward, architecture.vocabulary_size, context)

    @property
    def place(self) -> AttentionPlace:
        """Where its attention is computed."""
        return AttentionPlace(self.forward.device, self.forward.dtype, self.forward.heads)

    def static(self, *, captures: bool = True, attention: AttentionKind = "sdpa") -> StaticRunner:
        """On static buffers."""
        options = StaticOptions(max(NUM_NODES), self.context, attention=attention, captures=captures)
        return StaticRunner(self.forward, WholeRows(self.vocabulary_size), options)

    def ragged(self) -> LocalRunner:
        """On ragged rows."""
        return LocalRunner(self.forward, WholeRows(self.vocabulary_size))

    def part(self, session: int, tree: DraftTree | None, sampling: Sampling) -> Part:
        """A session's context, if there is no tree, or its tree after it."""
        rng = random.Random(session)
        room = torch.arange(session * (self.context + max(NUM_NODES)), (session + 1) * (self.context + max(NUM_NODES))).numpy()
        prompt = tuple(rng.randrange(self.vocabulary_size) for _ in range(self.context))
        return Part(
            session=session,
            token_ids=prompt if tree is None else tree.token_ids,
            context_slots=room[: 0 if tree is None else self.context],
            slots=room[: self.context] if tree is None else room[self.context : self.context + len(tree)],
            tree=tree,
            num_choices=0 if tree is None else len(tree),
            sampling=sampling,
            histories=None,
            num_node_probabilities=0,
            wants_features=False,
            accepts=tree is not None,
        )

    def prefill(self) -> None:
        """Compute every session's context."""
        for session in range(max(BATCH_SIZES)):
            self.ragged().step([self.part(session, None, Sampling())])

    def trees(self, batch_size: int, make: Callable[[random.Random], DraftTree], temperature: float = 0.0) -> list[Part]:
        """One tree for each session."""
        rng = random.Random(batch_size)
        return [self.part(session, make(rng), Sampling(temperature=temperature, seed=session)) for session in range(batch_size)]


def random_trees(model: Model, num_nodes: int) -> Callable[[random.Random], DraftTree]:
    """Makes trees of that many nodes."""
    return lambda rng: random_tree(rng, rng.randrange(model.vocabulary_size), model.vocabulary_size, num_nodes)


def chains(model: Model, num_nodes: int) -> Callable[[random.Random], DraftTree]:
    """Makes chains of that many nodes."""
    return lambda rng: DraftTree(
        tuple(rng.randrange(model.vocabulary_size) for _ in range(num_nodes)), (-1, *range(num_nodes - 1))
    )


def kinds_at(place: AttentionPlace, report: Report) -> list[AttentionKind]:
    """The kinds of attention that can be had; what cannot is noted with its reason."""
    kinds = []
    for kind in _KINDS:
        try:
            check_attention(kind, place)
        except Unsupported as error:
            if str(error) not in report.left_out:
                report.left_out.append(str(error))
                print(f"left out: {error}", flush=True)
        else:
            kinds.append(kind)
    return kinds


def check_buckets(model: Model, kind: AttentionKind, batch_sizes: Sequence[int], report: Report) -> None:
    """Graphs and the same function eagerly choose the same tokens, for random trees of every bucket, and walk as the core does.

    In float32 the choices are those of ragged rows. In 16 bits ties are common: what differs is counted, no more.
    """
    graphs, eager, ragged = model.static(attention=kind), model.static(captures=False, attention=kind), model.ragged()
    dtype = str(model.forward.dtype).removeprefix("torch.")
    for num_nodes in NUM_NODES:
        for batch_size in batch_sizes:
            # above depth 31 a drawing tree runs outside; random trees are far from that
            for temperature in (0.0, 1.0):
                parts = model.trees(batch_size, random_trees(model, num_nodes), temperature)
                replayed, run = graphs.step(parts), eager.step(parts)
                same = [one.token_ids for one in replayed] == [other.token_ids for other in run]
                num_far = num_far_choices(replayed, ragged.step(parts), temperature)
                walks = [one.acceptance == accepted(part, one) for part, one in zip(parts, replayed, strict=True)]
                report.check(
                    f"{kind}, {dtype}, bucket of {batch_size} x {num_nodes} nodes, temperature {temperature:g}",
                    same and all(walks) and not (num_far and dtype == "float32"),
                    f"replay {'equals' if same else 'DIFFERS FROM'} eager, {num_far} choices are not those of ragged rows, "
                    f"{sum(walks)} of {len(walks)} walks are the core's",
                )
    report.check(f"{kind}, {dtype}, steps outside buckets", not graphs.num_missed_graphs, f"{graphs.num_missed_graphs}")


def accepted(part: Part, posterior: Posterior) -> Acceptance:
    """By the core's own walk."""
    assert part.tree is not None
    return accept(part.tree, posterior.token_ids)


def num_far_choices(found: Sequence[Posterior], expected: Sequence[Posterior], temperature: float) -> int:
    """Choices that differ; greedy ones only where the two tokens' log-probs are not nearly the same."""
    num_far = 0
    for one, other in zip(found, expected, strict=True):
        assert other.distributions is not None
        differing = [node for node, pair in enumerate(zip(one.token_ids, other.token_ids, strict=True)) if pair[0] != pair[1]]
        for node in differing:
            pair = [other.distributions.log_probs([node], [each.token_ids[node]], 0)[0].log_prob for each in (one, other)]
            num_far += temperature > 0.0 or abs(pair[0] - pair[1]) > _NEAR_TIE
    return num_far


def check_kinds(device: str, scale: Scale, report: Report) -> None:
    """Attention of every kind over random trees in pages equals the reference in float64, for ratios of query to KV heads."""
    for dtype in sorted({"float32", scale.dtype}):
        for num_heads, num_kv_heads in RATIOS:
            heads = Heads(num_heads, num_kv_heads, scale.head_size)
            place = AttentionPlace(torch.device(device), PRECISIONS[dtype].dtype, heads)
            for kind in kinds_at(place, report):
                check_attention_of(kind, place, dtype, report)


def check_attention_of(kind: AttentionKind, place: AttentionPlace, dtype: str, report: Report) -> None:
    """One kind of attention, over page sizes and shapes of buckets."""
    rng, worst = random.Random(9), 0.0
    for page_size in PAGE_SIZES:
        for shape in (BucketShape(1, 1, 16), BucketShape(2, 17, 64), BucketShape(2, 65, 256)):
            case = Case.random(rng, shape, place.heads, page_size, place.dtype, str(place.device))
            attention = make_attention(kind, place, case.store, page_size, shape)(shape)
            worst = max(worst, case.largest_difference(attention))
    name = f"{kind} of {place.heads.num_heads} heads over {place.heads.num_kv_heads}, {dtype}"
    report.check(name, worst <= _ATTENTION_TOLERANCE[dtype], f"differs from the reference by at most {worst:.2g}")


def median_milliseconds(runner: Runner, parts: Sequence[Part], num_repeats: int) -> float:
    """Of whole steps, from parts to posteriors on the host."""
    for _ in range(2):
        runner.step(parts)
    taken = []
    for _ in range(num_repeats):
        started = time.perf_counter()
        runner.step(parts)
        taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def time_steps(name: str, model: Model, kind: AttentionKind, scale: Scale, report: Report) -> None:
    """Plain decoding, a chain of 15, trees; alone and in a batch; with the ratios that decide whether trees pay."""
    runner = model.static(attention=kind)
    for batch_size in _TIMED_BATCH_SIZES:
        makers = {"plain": random_trees(model, 1), "chain 15": chains(model, 16)}
        makers |= {f"tree {budget}": random_trees(model, budget + 1) for budget in scale.trees}
        taken = {
            step: median_milliseconds(runner, model.trees(batch_size, make), scale.num_repeats) for step, make in makers.items()
        }
        row = {"model": name, "attention": kind, "batch": batch_size}
        for step, milliseconds in taken.items():
            report.step_times.append({**row, "step": step, "milliseconds": milliseconds})
            ratio = milliseconds / taken["plain"]
            print(f"{name} {kind} batch {batch_size} {step:9} {milliseconds:9.3f} ms, {ratio:.2f} x plain", flush=True)
        left = next((budget for budget in scale.trees if taken[f"tree {budget}"] > _MEMORY_BOUND * taken["plain"]), None)
        ratios = {f"tree {budget} / chain 15": taken[f"tree {budget}"] / taken["chain 15"] for budget in scale.trees}
        report.ratios.append({**row, **ratios, "leaves the memory-bound regime at a budget of": left})


def time_host(model: Model, scale: Scale, report: Report) -> None:
    """Where the host's time of a step goes."""
    runner = model.static()
    parts = model.trees(1, random_trees(model, scale.trees[0] + 1))
    bucket = runner.bucket_for(parts)
    assert bucket is not None
    program = runner.program(bucket)
    stages: dict[str, list[float]] = {"write inputs": [], "launch": [], "wait and copy back": []}
    for _ in range(scale.num_repeats):
        marks = [time.perf_counter()]
        program.write(parts)
        marks.append(time.perf_counter())
        outputs = program.run()
        marks.append(time.perf_counter())
        assert outputs.found is not None
        outputs.found.cpu()
        marks.append(time.perf_counter())
        for number, taken in enumerate(stages.values()):
            taken.append((marks[number + 1] - marks[number]) * 1e3)
    report.host_milliseconds = {stage: statistics.median(taken) for stage, taken in stages.items()}
    print("host:", ", ".join(f"{stage} {taken:.3f} ms" for stage, taken in report.host_milliseconds.items()))


def engine_of(model: Model) -> TransformersTarget:
    """A target over the model."""
    target = Target("transformers", "random", model.vocabulary_size, "", max(NUM_NODES), 2 * model.context, ())
    return TransformersTarget(model.static(), target, PagedKv(model.forward.store.num_slots - 1))


def growing_trees(model: Model, num_nodes: int, num_rounds: int) -> Iterator[DraftTree]:
    """One tree a round, behind the root that the last round left: each round keeps its root and commits token 1."""
    for number in range(num_rounds):
        rng = random.Random(number)
        yield random_tree(rng, 1, model.vocabulary_size, num_nodes)


def time_rounds(model: Model, scale: Scale, report: Report) -> None:
    """A round of the verify side as a function call, and over gRPC: what the split costs, the drafter aside."""
    prompt, num_nodes = tuple(range(1, model.context // 2)), scale.trees[0] + 1
    engine = engine_of(model)
    engine.open(1, prompt, Sampling())
    engine.step([PrefillChunk(1, prompt, last=True)])
    together = []
    for tree in growing_trees(model, num_nodes, scale.num_repeats):
        started = time.perf_counter()
        engine.step([Scoring(1, tree)])
        engine.keep(1, Acceptance((0,), 1))
        together.append((time.perf_counter() - started) * 1e3)
    engine.release(1)
    apart, stages = asyncio.run(_rounds_over_grpc(engine_of(model), model, prompt, num_nodes, scale.num_repeats))
    medians = {"co-located": statistics.median(together), "split": statistics.median(apart)}
    report.round_milliseconds = {**medians, "split / co-located": medians["split"] / medians["co-located"]}
    report.service_milliseconds = {stage: statistics.median(taken) for stage, taken in stages.items()}
    print("round:", ", ".join(f"{way} {taken:.3f}" for way, taken in report.round_milliseconds.items()), "ms")
    print("service:", ", ".join(f"{stage} {taken:.3f}" for stage, taken in report.service_milliseconds.items()), "ms")


async def _rounds_over_grpc(
    engine: TransformersTarget, model: Model, prompt: Sequence[int], num_nodes: int, num_rounds: int
) -> tuple[list[float], dict[str, list[float]]]:
    """Rounds whose acceptance is the caller's, so that each is the same round as without gRPC.

    Milliseconds of the rounds, and of the service's stages in them.
    """
    taken: list[float] = []
    stages: dict[str, list[float]] = {}
    async with verify_server(engine) as (running, _), grpc.aio.insecure_channel(running.address) as channel:
        call = verify_pb2_grpc.VerifyServiceStub(channel).Verify()
        opening = verify_pb2.VerifyOpen(
            protocol_version=wire.PROTOCOL_VERSION,
            prompt_token_ids=wire.token_ids_to_bytes(prompt),
            accept=tree_pb2.ACCEPTANCE_CALLER,
        )
        await call.write(verify_pb2.VerifyRequest(open=opening))
        while (response := await call.read()).WhichOneof("event") != "scored":
            pass
        await call.write(verify_pb2.VerifyRequest(keep=verify_pb2.Keep(nodes=[0], next_token_id=1)))
        for tree in growing_trees(model, num_nodes, num_rounds):
            started = time.perf_counter()
            await call.write(verify_pb2.VerifyRequest(tree=wire.tree_to_message(tree)))
            response = await call.read()
            assert response.WhichOneof("event") == "scored"
            await call.write(verify_pb2.VerifyRequest(keep=verify_pb2.Keep(nodes=[0], next_token_id=1)))
            taken.append((time.perf_counter() - started) * 1e3)
            for stage, seconds in response.scored.stage_seconds.items():
                stages.setdefault(stage, []).append(seconds * 1e3)
        call.cancel()
    return taken, stages


def run(device: str, scale: Scale) -> Report:
    """Everything."""
    report = Report(provenance())
    with torch.inference_mode():
        check_kinds(device, scale, report)
        model = Model.of(scale.equality_model, "float32", device, scale.context)
        model.prefill()
        checked = kinds_at(model.place, report)
        for kind in checked:
            check_buckets(model, kind, _TIMED_BATCH_SIZES if kind == "sdpa" else _TIMED_BATCH_SIZES[:1], report)
        del model
        for name in scale.timed_models:
            model = Model.of(name, scale.dtype, device, scale.context)
            model.prefill()
            kinds = kinds_at(model.place, report)
            for kind in kinds:
                time_steps(name, model, kind, scale, report)
            if name == scale.timed_models[0]:
                for kind in sorted(set(kinds) - set(checked)):
                    check_buckets(model, kind, _TIMED_BATCH_SIZES[:1], report)
                time_host(model, scale, report)
                time_rounds(model, scale, report)
            del model
    return report


def main(argv: Sequence[str]) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args(argv)
    if asked.device == "cuda" and not torch.cuda.is_available():
        print("NOTHING was checked: there is no GPU here; --device cpu runs small shapes without graphs")
        return 0
    report = run(asked.device, GPU if asked.device == "cuda" else CPU)
    if asked.output is not None:
        asked.output.write_text(json.dumps(asdict(report), indent=2) + "\n")
    print(f"{len(report.checks)} checks, {len(report.failures)} failed")
    return int(bool(report.failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
