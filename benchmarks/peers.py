"""This file is the comparison with peers: the same weights, the same prompts, one stream, in one run.

transformers' own greedy `generate` and its prompt look-up run in this process, treewire as its users run it: a stack of
processes behind gRPC. llama.cpp runs on the GGUF of the same model in an environment of its own, .venv-peers, which
`make peers` sets up: by `llama-cpp-python` where it builds, else by the prebuilt `xllamacpp`. What could not be measured is in
the result with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from benchmarks.machine import provenance
from gateway.tokenization import Tokenization
from treewire.bench import PROMPTS, Plan, measure
from treewire.stack import Stack, StackOptions
from treewire.weights import PACKAGED_MODELS, default_cache_dir, original_gguf, resolve

RESULT = Path(__file__).parent / "results" / "peers.json"
LLAMA_PYTHON = Path(__file__).parents[1] / ".venv-peers" / "bin" / "python"


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


class Missing(NamedTuple):
    """A system that was not measured, and why."""

    system: str
    reason: str


def llama_rows(
    python: Path, gguf: Path | None, prompts: Sequence[Sequence[int]], max_tokens: int
) -> tuple[list[dict[str, Any]], list[Missing]]:
    """llama.cpp on the GGUF itself, by whichever binding that environment has; or why not."""
    if gguf is None:
        return [], [Missing("llama.cpp", "the model was not made of a GGUF file that is known here; --gguf gives one")]
    if not python.exists():
        return [], [Missing("llama.cpp", f"{python} is not there: make peers sets it up")]
    asked = json.dumps(
        {"gguf": str(gguf), "prompts": [list(prompt) for prompt in (prompts[0], *prompts)], "max_tokens": max_tokens}
    )
    script = Path(__file__).with_name("llama_peer.py")
    ran = subprocess.run([python, script], input=asked, capture_output=True, text=True, check=False)
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["no word"])[-1]
        return [], [Missing("llama.cpp", f"its run failed with status {ran.returncode}: {last}")]
    answer = json.loads(ran.stdout.splitlines()[-1])
    row = peer_row(
        "llama.cpp",
        f"plain, {gguf.stem.rsplit('.', 1)[-1]}",
        answer["tokens"],
        answer["seconds"],
        median(answer["first_seconds"]),
        None,
    )
    return [{**row, "binding": answer["binding"]}], [Missing(*missing) for missing in answer["missing"]]


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
    parser.add_argument("--gguf", type=Path, help="GGUF file for llama.cpp [default: the target's own]")
    parser.add_argument("--llama-python", type=Path, default=LLAMA_PYTHON, help="python of llama.cpp's environment")
    parser.add_argument("--output", type=Path, default=RESULT, help="where the result goes")
    arguments = parser.parse_args()
    path = resolve(arguments.target, cache_dir=default_cache_dir())
    tokenization = Tokenization.from_directory(path)
    prompts = [tokenization.encode_chat([{"role": "user", "content": text}]) for text in PROMPTS[: arguments.prompts]]
    console = Console()
    console.print("transformers ...")
    rows = transformers_rows(path, prompts, arguments.max_tokens)
    console.print("llama.cpp ...")
    gguf = arguments.gguf
    if gguf is None and arguments.target in PACKAGED_MODELS:
        gguf = original_gguf(PACKAGED_MODELS[arguments.target], default_cache_dir())
    llama, missing = llama_rows(arguments.llama_python, gguf, prompts, arguments.max_tokens)
    rows += llama
    console.print("treewire ...")
    plan = Plan(budgets=(8, 16), concurrencies=(1, 4), num_prompts=arguments.prompts, max_tokens=arguments.max_tokens)
    options = StackOptions(target=arguments.target, drafter=arguments.drafter, dtype=arguments.dtype, port=0)
    rows += asyncio.run(treewire_rows(options, plan))
    console.print(table(rows))
    for each in missing:
        console.print(f"not measured: {each.system}: {each.reason}")
    result = {**provenance(), "dtype": arguments.dtype, "not_measured": [each._asdict() for each in missing], "rows": rows}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"kept in {arguments.output}")


if __name__ == "__main__":
    main()
