"""This file records what the shipped drafter of the default target gives on the golden trace, and makes the trace.

`python -m tests.golden.record_shipped` is to be run whenever `drafters/smollm2-135m` has changed: it writes the expected
acceptance lengths and log-probs with the drafter's checksum. The trace is made anew, by running the target, only if there is
none, if the drafter taps other layers, or with `--trace`.
"""

from __future__ import annotations

import json
import sys

import torch
from safetensors.torch import save_file

from tests.golden.shipped import (
    EXPECTED,
    FOLDER,
    TRACE,
    checksum,
    load_drafter,
    load_trace,
    read_drafter,
    shipped_tapped_layers,
)
from training.generation import Answering, answer
from training.sources import held_out
from training.target import Target
from training.workspace import HELD_OUT_PROMPTS
from treewire.weights import DEFAULT_MODEL, resolve

PROMPTS = (9, 12, 20)  # of the held-out ones, by number
ANSWER_TOKENS = 40


def main() -> None:
    """Record."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    if "--trace" in sys.argv[1:] or not TRACE.exists() or load_trace().tapped_layers != shipped_tapped_layers():
        record_trace()
    reading = read_drafter(load_drafter(), load_trace())
    lengths = {rule: round(length, 4) for rule, length in reading.lengths.items()}
    log_probs = [round(log_prob, 4) for log_prob in reading.log_probs]
    EXPECTED.write_text(
        f'{{\n "drafter": "{checksum()}",\n "lengths": {json.dumps(lengths)},\n "log_probs": {json.dumps(log_probs)}\n}}\n'
    )
    print(lengths)


@torch.inference_mode()
def record_trace() -> None:
    """Write the target's greedy answers in float32, with what it held likeliest, and the tapped layers' outputs in float16."""
    target, layers = Target(resolve(DEFAULT_MODEL, quiet=True), bfloat16=False), shipped_tapped_layers()
    said = held_out(HELD_OUT_PROMPTS)
    tensors = {}
    for number, chosen in enumerate(PROMPTS):
        (answered,) = answer(target, [target.chat_prompt(said[chosen])], Answering(ANSWER_TOKENS), "golden")
        text = torch.tensor([answered.token_ids])
        output = target.model(input_ids=text, use_cache=False, output_hidden_states=True)
        best = output.logits[0].log_softmax(-1).max(-1)
        tensors |= {
            f"{number}.token_ids": text[0].int(),
            f"{number}.taps": torch.stack([output.hidden_states[layer + 1][0] for layer in layers]).half(),
            f"{number}.prompt_length": torch.tensor(len(answered.prompt_ids)),
            f"{number}.chosen_ids": best.indices.int(),
            f"{number}.chosen_log_probs": best.values.half(),
        }
    metadata = {"target": DEFAULT_MODEL, "tapped_layers": " ".join(map(str, layers))}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, TRACE, metadata=metadata)
    TRACE.chmod(0o644)


if __name__ == "__main__":
    main()
