"""This file is a drafter's checkpoint as both model services read it: its config, where its tensors lie, how the features that
it reads are made of the target's hidden states, and the weights of branches that were fitted to it."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from treewire.core.build import BranchWeights

CONFIG = "config.json"
CALIBRATION = "calibration.json"
CHECKSUMS = "SHA256SUMS"
RECURRENT = "treewire-recurrent"
DFLASH = "DFlashDraftModel"
_SINGLE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_FIRST_TAP, _LAYERS_AFTER_LAST_TAP = 1, 3


class ProjectionTensors(NamedTuple):
    """Names of the bias-free linear [hidden, taps x hidden] and of the norm's weight [hidden]."""

    linear: str
    norm: str


_PROJECTIONS = {
    DFLASH: ProjectionTensors("fc.weight", "hidden_norm.weight"),
    RECURRENT: ProjectionTensors("fuse.weight", "fuse_norm.weight"),
}


@dataclass(frozen=True)
class FeatureProjection:
    """How context features are made: the outputs of `tapped_layers`, in this order, concatenated, through a linear and a norm.

    With `normalize_taps` each tap is first divided by its root mean square. `hash` is that of all of this, weights included:
    two services with the same hash mean the same by a feature.
    """

    tapped_layers: tuple[int, ...]
    feature_size: int
    normalize_taps: bool
    rms_epsilon: float
    tensors: ProjectionTensors
    hash: str


def read_config(directory: Path) -> Mapping[str, Any]:
    """The checkpoint's `config.json`. Raises ValueError if it has none or it is no JSON object."""
    path = directory / CONFIG
    if not path.is_file():
        raise ValueError(f"{directory} has no {CONFIG}, so it is no drafter's checkpoint")
    values = json.loads(path.read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no JSON object")
    return values


def names_architecture(config: Mapping[str, Any]) -> bool:
    """True if the config says of itself that it is of a drafter that reads features, even one that is refused."""
    return "DFlash" in _named(config) or _named(config) == RECURRENT


def architecture_of(config: Mapping[str, Any]) -> str:
    """Which kind of drafter this is, `DFLASH` or `RECURRENT`. Raises ValueError, with the reason, for others."""
    named = _named(config)
    if "DFlash2" in named or "selector_rank" in config.get("dflash_config", {}):
        raise ValueError(
            f"{named or 'this checkpoint'} is a DFlash2 drafter: its candidate selector scores a token given the token chosen "
            "before it, and this engine drafts conditional marginals for recurrent drafters alone"
        )
    if named not in _PROJECTIONS:
        raise ValueError(f"architecture is {named!r}, known are {', '.join(_PROJECTIONS)}")
    return named


def _named(config: Mapping[str, Any]) -> str:
    return str(config.get("architecture") or (config.get("architectures") or [""])[0])


def read_branch_weights(directory: Path) -> BranchWeights | None:
    """The weights that `treewire calibrate` has left beside a checkpoint; None if it has left none.

    Raises ValueError, naming the file, if they are not what it writes.
    """
    path = directory / CALIBRATION
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return BranchWeights(float(values["log_prob_weight"]), float(values["noise_weight"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no calibration with log_prob_weight and noise_weight: {error}") from error


def write_branch_weights(directory: Path, weights: BranchWeights) -> Path:
    """Leave weights beside a checkpoint; its list of checksums, if it has one, tells of the file, which is returned."""
    path, sums = directory / CALIBRATION, directory / CHECKSUMS
    fitted = {"log_prob_weight": round(weights.log_prob, 3), "noise_weight": round(weights.noise, 3)}
    path.write_text(json.dumps(fitted, indent=2) + "\n", encoding="utf-8")
    if sums.is_file():
        line = f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {CALIBRATION}"
        others = [other for other in sums.read_text().splitlines() if not other.endswith(f"  {CALIBRATION}")]
        sums.write_text("".join(f"{each}\n" for each in sorted([*others, line], key=lambda each: each.split("  ")[1])))
    return path


def tapped_layers_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Target layers whose outputs the drafter reads. A DFlash config that names none spreads them over the target's layers."""
    if architecture_of(config) == RECURRENT:
        return tuple(config["tapped_layers"])
    own = config.get("dflash_config", {})
    named = own.get("target_layer_ids", config.get("target_layer_ids"))
    return tuple(named) if named else spread_taps(config["num_target_layers"], config["num_hidden_layers"])


def spread_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """DFlash's own choice of taps: spread evenly from layer 1 to the third before the last; a single one in the middle."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - _LAYERS_AFTER_LAST_TAP - _FIRST_TAP
    return tuple(round(_FIRST_TAP + number * span / (num_taps - 1)) for number in range(num_taps))


def feature_projection(directory: Path) -> FeatureProjection:
    """What the checkpoint says of its features. Raises ValueError if its tensors do not fit its config."""
    config = read_config(directory)
    architecture = architecture_of(config)
    tensors, taps, size = _PROJECTIONS[architecture], tapped_layers_of(config), int(config["hidden_size"])
    is_recurrent = architecture == RECURRENT
    normalize = is_recurrent or bool(config.get("dflash_config", {}).get("normalize_taps", False))
    epsilon = float(config["rms_epsilon"] if is_recurrent else config["rms_norm_eps"])
    stored = stored_tensors(directory)
    for name, shape in ((tensors.linear, (size, size * len(taps))), (tensors.norm, (size,))):
        if name not in stored:
            raise ValueError(f"{directory} has no tensor {name}")
        if stored[name].shape != shape:
            raise ValueError(f"{name} has shape {list(stored[name].shape)}, {len(taps)} taps of {size} need {list(shape)}")
    digest = hashlib.sha256(json.dumps([architecture, taps, size, normalize, epsilon]).encode())
    for name in tensors:
        digest.update(f"{name} {stored[name].dtype}".encode())
        digest.update(stored[name].read())
    return FeatureProjection(taps, size, normalize, epsilon, tensors, digest.hexdigest())


class StoredTensor(NamedTuple):
    """Where a tensor lies: from byte `start` up to `stop` of a safetensors file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def read(self) -> bytes:
        """The tensor's bytes as they are stored."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.stop - self.start)


def stored_tensors(directory: Path) -> Mapping[str, StoredTensor]:
    """Every tensor of a checkpoint of one safetensors file, or of several with an index. Raises ValueError if there is none."""
    return {name: tensor for path in _files(directory) for name, tensor in _tensors_of(path)}


def _files(directory: Path) -> list[Path]:
    if (directory / _SINGLE_FILE).is_file():
        return [directory / _SINGLE_FILE]
    if (directory / _INDEX).is_file():
        names = json.loads((directory / _INDEX).read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    raise ValueError(f"{directory} has neither {_SINGLE_FILE} nor {_INDEX}")


def _tensors_of(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The header of a safetensors file: its length in 8 bytes, then JSON, then the tensors' bytes."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
        header = json.loads(file.read(length))
    base = _LENGTH_BYTES + length
    for name, entry in header.items():
        if name != "__metadata__":
            start, stop = entry["data_offsets"]
            yield name, StoredTensor(path, entry["dtype"], tuple(entry["shape"]), base + start, base + stop)
