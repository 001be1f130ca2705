"""Settings: precedence, refusals that name the key, and secrets that stay secret."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, ValidationError

from treewire.runtime.settings import Address, BadSettings, Endpoint, ServiceSettings, load, run_command


class ToySettings(ServiceSettings):
    service: ClassVar[str] = "toy"

    num_nodes: int = Field(16, ge=1, description="Nodes.")
    targets: tuple[Address, ...] = Field((), description="Targets.")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("TREEWIRE_TOKEN", "TREEWIRE_TOKEN_FILE"):
        monkeypatch.delenv(key, raising=False)


def served_nothing(settings: ToySettings) -> int:
    raise AssertionError(f"served {settings}")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each value comes from the first of the four that has it, and `config show` says from which."""
    file = write(tmp_path / "toy.toml", "num_nodes = 2\ngrace_seconds = 2.5\nlog_level = 'error'\n")
    monkeypatch.setenv("TREEWIRE_TOY_NUM_NODES", "3")
    monkeypatch.setenv("TREEWIRE_TOY_GRACE_SECONDS", "3.5")
    flags = ["--config", file, "--num-nodes", "4"]
    settings = load(ToySettings, flags)
    assert (settings.num_nodes, settings.grace_seconds, settings.log_level) == (4, 3.5, "error")
    assert run_command(ToySettings, ["config", "show", *flags], served_nothing) == 0
    shown = capsys.readouterr().out.splitlines()
    for line in (
        "num_nodes = 4  # flag",
        "grace_seconds = 3.5  # environment",
        'log_level = "error"  # file',
        'bind = "127.0.0.1:50051"  # default',
    ):
        assert line in shown


def test_the_file_can_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TREEWIRE_<SERVICE>_CONFIG names the file as --config does."""
    monkeypatch.setenv("TREEWIRE_TOY_CONFIG", write(tmp_path / "toy.toml", "targets = ['a:1', 'b:2']"))
    assert load(ToySettings, []).targets == ("a:1", "b:2")


def test_lists_are_repeated_or_have_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    """--targets a --targets b, --targets a,b and the environment's a,b are the same."""
    expected = ("a:1", "b:2")
    assert load(ToySettings, ["--targets", "a:1", "--targets", "b:2"]).targets == expected
    assert load(ToySettings, ["--targets", "a:1,b:2"]).targets == expected
    monkeypatch.setenv("TREEWIRE_TOY_TARGETS", "a:1, b:2")
    assert load(ToySettings, []).targets == expected


@pytest.mark.parametrize(
    ("flags", "environment", "file", "message"),
    [
        (["--num-node", "3"], {}, "", "unknown flag --num-node, the nearest is --num-nodes"),
        (["serve"], {}, "", "serve is not understood"),
        ([], {"TREEWIRE_TOY_BINDS": "x"}, "", "variable TREEWIRE_TOY_BINDS, the nearest is TREEWIRE_TOY_BIND"),
        ([], {}, "num_nods = 3", "unknown key num_nods, the nearest is num_nodes"),
        ([], {}, "num_nodes = ", "is not TOML"),
        (["--num-nodes", "0"], {}, "", "num_nodes (flag): Input should be greater than or equal to 1, not '0'"),
        ([], {"TREEWIRE_TOY_NUM_NODES": "many"}, "", "num_nodes (environment): Input should be a valid integer"),
        ([], {}, "log_level = 'loud'", "log_level (file): Input should be"),
        (["--bind", "localhost"], {}, "", '"localhost" is not an address'),
        (["--config", "/nonexistent/toy.toml"], {}, "", "cannot read /nonexistent/toy.toml"),
        (["--token", "s3cret", "--token-file", "t"], {}, "", "token and token_file are both set"),
        (["--tls-key-file", "k"], {}, "", "tls_certificate_file and tls_key_file go together"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(
    flags: list[str],
    environment: dict[str, str],
    file: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is unknown or does not fit is named, with the nearest known name; nothing is served."""
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    if file:
        flags = [*flags, "--config", write(tmp_path / "toy.toml", file)]
    assert run_command(ToySettings, flags, served_nothing) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert "s3cret" not in error


def test_addresses_that_kubernetes_injects_are_not_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Kubernetes Service named treewire-toy puts its addresses under our prefix; that does not stop us."""
    for key in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50051_TCP", "PORT_50051_TCP_ADDR"):
        monkeypatch.setenv(f"TREEWIRE_TOY_{key}", "10.0.0.1")
    assert load(ToySettings, []).bind == "127.0.0.1:50051"


@pytest.mark.parametrize("bind", ["0.0.0.0:50051", "[::]:50051", "gpu-1.example:50051"])
def test_a_bind_that_others_reach_needs_credentials(bind: str) -> None:
    """Not loopback and no credentials is refused with the reason; a token, mutual TLS or an explicit wish lets it pass."""
    with pytest.raises(BadSettings, match="can be reached from other machines: set token"):
        load(ToySettings, ["--bind", bind])
    tls = ["--tls-certificate-file", "c", "--tls-key-file", "k", "--tls-client-ca-file", "a"]
    for credentials in (["--token", "t"], ["--token-file", "f"], tls, ["--allow-anonymous"]):
        assert load(ToySettings, ["--bind", bind, *credentials]).bind == bind
    with pytest.raises(ValidationError, match="can be reached"):
        ToySettings.model_validate({"bind": bind})


@pytest.mark.parametrize("bind", ["127.0.0.1:0", "127.8.9.1:1", "[::1]:2", "localhost:3", "unix:/run/treewire.sock"])
def test_loopback_needs_none(bind: str) -> None:
    """Only this machine reaches these."""
    assert load(ToySettings, ["--bind", bind]).listen.is_loopback


def test_the_token_is_shared_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TREEWIRE_TOKEN serves every service, an empty variable is as good as none, and no output has the token."""
    monkeypatch.setenv("TREEWIRE_TOKEN", "s3cret")
    settings = load(ToySettings, [])
    assert settings.read_token() == "s3cret"
    assert "s3cret" not in repr(settings)
    run_command(ToySettings, ["config", "show"], served_nothing)
    assert "s3cret" not in capsys.readouterr().out
    monkeypatch.setenv("TREEWIRE_TOKEN", "")
    monkeypatch.setenv("TREEWIRE_TOKEN_FILE", write(tmp_path / "token", "from-file\n"))
    assert load(ToySettings, []).read_token() == "from-file"
    monkeypatch.setenv("TREEWIRE_TOKEN_FILE", write(tmp_path / "token", "\n"))
    with pytest.raises(BadSettings, match="is empty"):
        load(ToySettings, []).read_token()


def test_a_mistyped_secret_flag_does_not_show_its_value() -> None:
    """The error names the flag alone."""
    with pytest.raises(BadSettings) as refused:
        load(ToySettings, ["--tokn=s3cret"])
    assert "--tokn," in str(refused.value)
    assert "s3cret" not in str(refused.value)


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    """--help lists each flag and exits with 0."""
    with pytest.raises(SystemExit) as exited:
        load(ToySettings, ["--help"])
    assert exited.value.code == 0
    shown = capsys.readouterr().out
    for name in ToySettings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown
    assert " ".join(shown.split()).count("(default: ") == len(ToySettings.model_fields)


def test_run_command_serves() -> None:
    """With good settings the exit code is that of serving."""
    assert run_command(ToySettings, ["--num-nodes", "7"], lambda settings: settings.num_nodes) == 7


@pytest.mark.parametrize("text", ["10.0.0.1:80", "host-a.b:0", "[::1]:50051", "unix:/run/x.sock"])
def test_an_endpoint_reads_as_it_is_written(text: str) -> None:
    """Parsing and writing are inverse."""
    assert str(Endpoint.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":1", "::1:50051", "[::1]", "[12:34]:1", "a:65536", "unix:", "http://a:1"]
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    """The error repeats the text."""
    with pytest.raises(ValueError, match='"'):
        Endpoint.parse(text)
