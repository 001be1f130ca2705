"""This file is the comparison with peers: the same weights, the same prompts, one stream, in one run.

transformers' own greedy `generate` and its prompt look-up run in this process, treewire as its users run it: a stack of
processes behind gRPC. llama.cpp is measured where `llama-cpp-python` is installed and a GGUF file is given.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.machine import provenance
from gateway.tokenization import Tokenization
from treewire.bench import PROMPTS, Plan, measure
from treewire.stack import Stack, StackOptions
from treewire.weights import default_cache_dir, resolve

RESULT = Path(__file__).parent / "results" / "peers.json"


def peer_row(system: str, mode: str, tokens: int, seconds: float, ttft_seconds: float, rounds: int | None) -> dict[str, Any]:
    """A row of the shape that `treewire bench` gives."""
    return {
        "system": system,
        "mode": mode,
        "concurrency": 1,
        "budget": 0,
        "tokens_per_second": tokens / seconds,
        "mean_acceptance_length": tokens / rounds if rounds else 1.0,
        "ttft_seconds": ttft_seconds,
    }


class CountingModel:
    """transformers' model with its forwards counted and its first token timed."""

    def __init__(self, path: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._forward: Callable[..., Any] = self._model.forward
        self._model.forward = self._counted
        self.forwards = 0
        self.first_seconds: list[float] = []
        self._started = 0.0

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        output = self._forward(*args, **kwargs)
        if self.forwards == 0:
            self.first_seconds.append(time.perf_counter() - self._started)
        self.forwards += 1
        return output

    def generate(self, prompt: Sequence[int], max_tokens: int, **options: Any) -> int:
        """Tokens generated, greedily."""
        self.forwards, self._started = 0, time.perf_counter()
        ids = torch.tensor([list(prompt)])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0, **options
        )
        return int(output.shape[1] - ids.shape[1])


def transformers_rows(path: Path, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
    """transformers' greedy decoding, plain and with prompt look-up."""
    rows = []
    model = CountingModel(path)
    model.generate(prompts[0], 4)
    for mode, options in (("plain", {}), ("prompt look-up", {"prompt_lookup_num_tokens": 8})):
        tokens = rounds = 0
        model.first_seconds.clear()
        started = time.perf_counter()
        for prompt in prompts:
            tokens += model.generate(prompt, max_tokens, **options)
            rounds += model.forwards
        seconds = time.perf_counter() - started
        rows.append(peer_row("transformers", mode, tokens, seconds, median(model.first_seconds), rounds))
    return rows


def llama_rows(gguf: Path | None, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
    """llama.cpp on the GGUF itself; none where it is not to be had."""
    try:
        from llama_cpp import Llama
    except ImportError:
        return []
    if gguf is None:
        return []
    model = Llama(str(gguf), n_ctx=2048, verbose=False)
    tokens, first, started = 0, [], time.perf_counter()
    for prompt in prompts:
        begun, produced = time.perf_counter(), 0
        for token in model.generate(list(prompt), temp=0.0):
            if produced == 0:
                first.append(time.perf_counter() - begun)
            produced += 1
            if produced >= max_tokens or token == model.token_eos():
                break
        tokens += produced
    return [peer_row("llama.cpp", "plain, Q4_1", tokens, time.perf_counter() - started, median(first), None)]


async def treewire_rows(options: StackOptions, plan: Plan) -> list[dict[str, Any]]:
    """treewire's rows, from a stack of processes."""
    async with Stack(options) as stack:
        return [asdict(row) for row in await measure(stack.address, plan)]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """For people: rates beside transformers' plain decoding."""
    shown = Table("system", "mode", "streams", "budget", "tokens/s", "to transformers", "tokens a round", "TTFT")
    base = rows[0]["tokens_per_second"]
    for row in rows:
        shown.add_row(
            row["system"],
            row["mode"],
            str(row["concurrency"]),
            str(row["budget"]),
            f"{row['tokens_per_second']:.1f}",
            f"{row['tokens_per_second'] / base:.2f}x",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['ttft_seconds'] * 1000:.0f} ms",
        )
    return shown


def main() -> None:
    """Measure, print, and keep the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="whose weights")
    parser.add_argument("--drafter", default=StackOptions.drafter, help="treewire's drafter")
    parser.add_argument("--dtype", default=StackOptions.dtype, help="type of treewire's weights")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of each system")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--gguf", type=Path, help="GGUF file for llama.cpp")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the result goes")
    arguments = parser.parse_args()
    path = resolve(arguments.target, cache_dir=default_cache_dir())
    tokenization = Tokenization.from_directory(path)
    prompts = [tokenization.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[: arguments.prompts]]
    console = Console()
    console.print("transformers ...")
    rows = transformers_rows(path, prompts, arguments.max_tokens)
    rows += llama_rows(arguments.gguf, prompts, arguments.max_tokens)
    console.print("treewire ...")
    plan = Plan(budgets=(8, 16), concurrencies=(1, 4), num_prompts=arguments.prompts, max_tokens=arguments.max_tokens)
    options = StackOptions(target=arguments.target, drafter=arguments.drafter, dtype=arguments.dtype, port=0)
    rows += asyncio.run(treewire_rows(options, plan))
    console.print(table(rows))
    arguments.output.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")
    console.print(f"kept in {arguments.output}")


if __name__ == "__main__":
    main()
