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
from tests.engines.target_contract import random_tree
from tests.gpu.shapes import SHAPES, RandomWeights
from tests.system.local_stack import verify_server
from treewire import wire
from treewire.core.acceptance import Acceptance
from treewire.core.sampling import Sampling
from treewire.core.tree import DraftTree
from treewire.kv.pages import PagedKv
from treewire.kv.store import KvStore
from treewire.v1 import tree_pb2, verify_pb2, verify_pb2_grpc
from verify_service.attention.tree_attention import TreeAttention, double_core, fused_core
from verify_service.engine import Posterior, PrefillChunk, Scoring, Target
from verify_service.engines.transformers import TransformersTarget
from verify_service.engines.transformers.architecture import Architecture
from verify_service.engines.transformers.choices import WholeRows
from verify_service.engines.transformers.lean import PRECISIONS, LeanForward
from verify_service.engines.transformers.parts import Part
from verify_service.engines.transformers.runner import LocalRunner, Runner
from verify_service.engines.transformers.static_step import NUM_NODES, StaticRunner

_BATCH_SIZES = (1, 8)
_MEMORY_BOUND = 1.25  # a step that takes more than this times plain decoding's is no longer bound by reading the weights
_NEAR_TIE = 1e-2  # two log-probs so close may change places between kernels
_ATTENTION_TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Scale:
    """How much is tried. `context` is the tokens before the trees."""

    equality_model: str
    timed_models: tuple[str, ...]
    dtype: str
    context: int
    trees: tuple[int, ...]
    num_repeats: int


GPU = Scale("qwen3-0.6b", ("qwen3-0.6b", "qwen3-8b"), "bfloat16", 500, (16, 64, 128, 256, 512), 20)
CPU = Scale("small", ("small",), "float32", 40, (16, 64), 5)


@dataclass
class Report:
    """What was found; `failures` are the checks that did not hold."""

    machine: dict[str, Any]
    checks: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    step_times: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    host_milliseconds: dict[str, float] = field(default_factory=dict)
    round_milliseconds: dict[str, float] = field(default_factory=dict)

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
        num_slots = max(_BATCH_SIZES) * (context + max(NUM_NODES)) + 1
        weights = RandomWeights(config, device, PRECISIONS[dtype].dtype)
        forward = LeanForward(architecture, weights, PRECISIONS[dtype], TreeAttention(KvStore(num_slots)), device)
        return cls(forward, architecture.vocabulary_size, context)

    def static(self, *, captures: bool) -> StaticRunner:
        """On static buffers."""
        sizes = {"max_nodes": max(NUM_NODES), "max_context": self.context}
        return StaticRunner(self.forward, WholeRows(self.vocabulary_size), captures=captures, **sizes)

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
        )

    def prefill(self) -> None:
        """Compute every session's context."""
        for session in range(max(_BATCH_SIZES)):
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


def check_buckets(model: Model, report: Report) -> None:
    """Graphs, the same function eagerly, and ragged rows choose the same tokens, for random trees of every bucket."""
    graphs, eager, ragged = model.static(captures=True), model.static(captures=False), model.ragged()
    for num_nodes in NUM_NODES:
        for batch_size in _BATCH_SIZES:
            # above depth 31 a drawing tree runs outside; random trees are far from that
            for temperature in (0.0, 1.0):
                parts = model.trees(batch_size, random_trees(model, num_nodes), temperature)
                replayed, run = graphs.step(parts), eager.step(parts)
                same = [one.token_ids for one in replayed] == [other.token_ids for other in run]
                num_far = num_far_choices(replayed, ragged.step(parts), temperature)
                report.check(
                    f"bucket of {batch_size} x {num_nodes} nodes, temperature {temperature:g}",
                    same and not num_far,
                    f"replay {'equals' if same else 'DIFFERS FROM'} eager, {num_far} choices are not those of ragged rows",
                )
    report.check("steps outside buckets", not graphs.num_missed_graphs, f"{graphs.num_missed_graphs}")


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


def check_attention(device: str, dtype: str, report: Report) -> None:
    """Attention over contexts and random trees equals the reference in float64, for ratios of query to KV heads."""
    rng = random.Random(9)
    generator = torch.Generator(device).manual_seed(9)
    for num_heads, num_kv_heads in ((4, 4), (8, 2), (16, 2)):
        worst = 0.0
        for num_nodes, context in ((1, 7), (17, 33), (65, 100)):
            tree = random_tree(rng, 0, 997, num_nodes)
            visible = torch.zeros(num_nodes, context + num_nodes, dtype=torch.bool)
            visible[:, :context] = True
            for node in range(num_nodes):
                visible[node, [context + step for step in tree.path(node)]] = True
            mask = torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))[None].to(device, PRECISIONS[dtype].dtype)
            query, key, value = (
                torch.randn(1, heads, rows, 64, generator=generator, device=device, dtype=PRECISIONS[dtype].dtype)
                for heads, rows in ((num_heads, num_nodes), *[(num_kv_heads, context + num_nodes)] * 2)
            )
            cores = [core(query, key, value, mask, False, 0.125).float() for core in (fused_core, double_core)]
            worst = max(worst, (cores[0] - cores[1]).abs().max().item())
        holds = worst <= _ATTENTION_TOLERANCE[dtype]
        report.check(f"attention of {num_heads} heads over {num_kv_heads}, {dtype}", holds, f"differs by at most {worst:.2g}")


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


def time_steps(name: str, model: Model, scale: Scale, report: Report) -> None:
    """Plain decoding, a chain of 15, trees; alone and in a batch; with the ratios that decide whether trees pay."""
    runner = model.static(captures=True)
    for batch_size in _BATCH_SIZES:
        makers = {"plain": random_trees(model, 1), "chain 15": chains(model, 16)}
        makers |= {f"tree {budget}": random_trees(model, budget + 1) for budget in scale.trees}
        taken = {
            step: median_milliseconds(runner, model.trees(batch_size, make), scale.num_repeats) for step, make in makers.items()
        }
        for step, milliseconds in taken.items():
            report.step_times.append({"model": name, "batch": batch_size, "step": step, "milliseconds": milliseconds})
            print(f"{name} batch {batch_size} {step:9} {milliseconds:9.3f} ms, {milliseconds / taken['plain']:.2f} x plain")
        left = next((budget for budget in scale.trees if taken[f"tree {budget}"] > _MEMORY_BOUND * taken["plain"]), None)
        first = f"tree {scale.trees[0]}"
        report.ratios.append(
            {
                "model": name,
                "batch": batch_size,
                f"{first} / chain 15": taken[first] / taken["chain 15"],
                "leaves the memory-bound regime at a budget of": left,
            }
        )


def time_host(model: Model, scale: Scale, report: Report) -> None:
    """Where the host's time of a step goes."""
    runner = model.static(captures=True)
    parts = model.trees(1, random_trees(model, scale.trees[0] + 1))
    bucket = runner.bucket_for(parts)
    assert bucket is not None
    program = runner.program(bucket)
    stages: dict[str, list[float]] = {"write inputs": [], "launch": [], "wait and copy back": []}
    for _ in range(scale.num_repeats):
        marks = [time.perf_counter()]
        runner.write(program.host, parts)
        marks.append(time.perf_counter())
        outputs = program.run()
        marks.append(time.perf_counter())
        assert outputs.chosen is not None
        outputs.chosen.cpu()
        marks.append(time.perf_counter())
        for number, taken in enumerate(stages.values()):
            taken.append((marks[number + 1] - marks[number]) * 1e3)
    report.host_milliseconds = {stage: statistics.median(taken) for stage, taken in stages.items()}
    print("host:", ", ".join(f"{stage} {taken:.3f} ms" for stage, taken in report.host_milliseconds.items()))


def engine_of(model: Model) -> TransformersTarget:
    """A target over the model."""
    target = Target("transformers", "random", model.vocabulary_size, "", max(NUM_NODES), 2 * model.context, ())
    return TransformersTarget(model.static(captures=True), target, PagedKv(model.forward.store.num_slots - 1))


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
    apart = asyncio.run(_rounds_over_grpc(engine_of(model), model, prompt, num_nodes, scale.num_repeats))
    report.round_milliseconds = {"co-located": statistics.median(together), "split": statistics.median(apart)}
    print("round:", ", ".join(f"{way} {taken:.3f} ms" for way, taken in report.round_milliseconds.items()))


async def _rounds_over_grpc(
    engine: TransformersTarget, model: Model, prompt: Sequence[int], num_nodes: int, num_rounds: int
) -> list[float]:
    """Rounds whose acceptance is the caller's, so that each is the same round as without gRPC; milliseconds."""
    taken = []
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
        call.cancel()
    return taken


def run(device: str, scale: Scale) -> Report:
    """Everything."""
    report = Report(provenance())
    with torch.inference_mode():
        for dtype in sorted({"float32", scale.dtype}):
            check_attention(device, dtype, report)
        model = Model.of(scale.equality_model, "float32", device, scale.context)
        model.prefill()
        check_buckets(model, report)
        del model
        for name in scale.timed_models:
            model = Model.of(name, scale.dtype, device, scale.context)
            model.prefill()
            time_steps(name, model, scale, report)
            if name == scale.timed_models[0]:
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
