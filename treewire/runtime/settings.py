"""This file is how a service is set up: flag, else environment, else file, else default; what is unknown is refused."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeVar, get_origin

from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from treewire.runtime.endpoint import Endpoint as Endpoint
from treewire.runtime.keys import BadKeys, Keys
from treewire.runtime.logging import LogFormat, LogLevel
from treewire.runtime.tls import Certificates
from treewire.wire import MAX_MESSAGE_BYTES

Source = Literal["flag", "environment", "file", "default"]
Address = Annotated[str, AfterValidator(lambda text: str(Endpoint.parse(text)))]
"""A setting that holds an Endpoint, as text."""
OptionalAddress = Annotated[str, AfterValidator(lambda text: text and str(Endpoint.parse(text)))]
"""As Address; empty turns off what it is for."""

_PREFIX = "TREEWIRE_"
_SHARED = ("token", "token_file")  # read from TREEWIRE_TOKEN and TREEWIRE_TOKEN_FILE by every service
_SHOW = ("config", "show")
_USAGE_EXIT_CODE = 2
# Kubernetes puts the addresses of a Service named treewire-verify under our prefix; those are not settings.
_SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?$")


class BadSettings(Exception):
    """The settings cannot be used; the message is one line that names the key."""


class ServiceSettings(BaseSettings):
    """What every service can be told. A subclass names its `service` and adds fields, each with a default and a description."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, enable_decoding=False, validate_default=True, hide_input_in_errors=True
    )
    service: ClassVar[str]

    config: Path | None = Field(None, description="TOML file with settings.")
    bind: Address = Field(
        "127.0.0.1:50051", description="Where to listen: host:port, [ipv6]:port or unix:/path; port 0 is any."
    )
    token: SecretStr | None = Field(None, description="Bearer token that callers must show.", min_length=1)
    token_file: Path | None = Field(None, description="File that holds the token.")
    keys_file: Path | None = Field(None, description="TOML file of callers with keys and limits; read again when it changes.")
    allow_anonymous: bool = Field(False, description="Ask callers for no token, wherever they are.")
    tls_certificate_file: Path | None = Field(None, description="PEM certificate chain; turns TLS on.")
    tls_key_file: Path | None = Field(None, description="PEM private key of the certificate.")
    tls_client_ca_file: Path | None = Field(None, description="PEM authorities whose client certificates are required.")
    metrics_bind: OptionalAddress = Field("", description="Where to serve /metrics, e.g. 127.0.0.1:9090; empty is off.")
    log_level: LogLevel = Field("info", description="Least level to log.")
    log_format: LogFormat = Field("auto", description="auto is console on a terminal and json elsewhere.")
    grace_seconds: float = Field(10.0, ge=0, description="Seconds that running RPCs have to finish at shutdown.")
    stalled_reader_seconds: float = Field(
        60.0, gt=0, description="Longest time in which a reader takes no message; then its RPC ends."
    )
    reflection: Literal["auto", "on", "off"] = Field(
        "auto", description="gRPC reflection; auto is on if only loopback listens."
    )
    max_message_bytes: int = Field(MAX_MESSAGE_BYTES, ge=4096, description="Largest message, either way.")
    cache_dir: Path | None = Field(None, description="Where weights are kept; unset is the user's cache directory.")
    exit_with_parent: bool = Field(False, description="Shut down when the parent process ends (Linux).")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Constructing reads only its arguments: the world is read by `load`."""
        return (init_settings,)

    @model_validator(mode="before")
    @classmethod
    def _split_lists(cls, values: dict[str, Any]) -> dict[str, Any]:
        """A flag or the environment writes a list with commas."""
        return {key: _parts(value) if isinstance(value, str) and _is_list(cls, key) else value for key, value in values.items()}

    @model_validator(mode="after")
    def _check_token(self) -> Self:
        if self.token is not None and self.token_file is not None:
            raise ValueError("token and token_file are both set: set one")
        if (self.tls_certificate_file is None) != (self.tls_key_file is None):
            raise ValueError("tls_certificate_file and tls_key_file go together: one is missing")
        if self.tls_client_ca_file is not None and self.tls_certificate_file is None:
            raise ValueError("tls_client_ca_file needs tls_certificate_file and tls_key_file")
        return self

    @model_validator(mode="after")
    def _check_exposure(self) -> Self:
        self.check_exposure("bind", self.listen)
        return self

    def check_exposure(self, name: str, endpoint: Endpoint) -> None:
        """ValueError if other machines can reach what setting `name` opens and nothing says who may call."""
        known = (self.token, self.token_file, self.keys_file, self.tls_client_ca_file)
        if not (endpoint.is_loopback or self.allow_anonymous or any(each is not None for each in known)):
            raise ValueError(
                f"{name} {endpoint} can be reached from other machines: set token, token_file, keys_file or "
                "tls_client_ca_file, or allow_anonymous to serve anybody"
            )

    @property
    def certificates(self) -> Certificates | None:
        """What the server shows and asks for; None serves in clear text."""
        if self.tls_certificate_file is None:
            return None
        return Certificates(self.tls_certificate_file, self.tls_key_file, self.tls_client_ca_file)

    def keys(self) -> Keys:
        """Who may call; BadSettings if the token's or the keys' file cannot be used."""
        try:
            return Keys(self.read_token(), self.keys_file, allow_anonymous=self.allow_anonymous)
        except BadKeys as error:
            raise BadSettings(f"keys_file: {error}") from error

    @property
    def listen(self) -> Endpoint:
        """`bind`, parsed."""
        return Endpoint.parse(self.bind)

    def read_token(self) -> str | None:
        """The token itself, from wherever it is set; BadSettings if its file cannot be read or is empty."""
        if self.token is not None:
            return self.token.get_secret_value()
        if self.token_file is None:
            return None
        token = _read(self.token_file, "token_file").strip()
        if not token:
            raise BadSettings(f"token_file: {self.token_file} is empty")
        return token


Settings = TypeVar("Settings", bound=ServiceSettings)


class _Loaded(NamedTuple):
    """Settings, and where each value comes from."""

    settings: ServiceSettings
    sources: Mapping[str, Source]


def load(settings_class: type[Settings], argv: Sequence[str]) -> Settings:
    """The settings of flags (program name excluded), environment, file and defaults, in this order of precedence.

    BadSettings in one line if anything is unknown or does not fit; `--help` prints and exits.
    """
    settings = _load(settings_class, argv).settings
    assert isinstance(settings, settings_class)
    return settings


def run_command(settings_class: type[Settings], argv: Sequence[str], serve: Callable[[Settings], int]) -> int:
    """What a service's `__main__` does: serve, or for `config show` print the effective settings. Bad settings give 2."""
    try:
        if tuple(argv[:2]) == _SHOW:
            print(_as_toml(_load(settings_class, argv[2:])))
            return 0
        return serve(load(settings_class, argv))
    except BadSettings as error:
        print(f"{settings_class.service}: {error}", file=sys.stderr)
        return _USAGE_EXIT_CODE


def _load(settings_class: type[Settings], argv: Sequence[str]) -> _Loaded:
    flags = _flags(settings_class, argv)
    environment = _environment(settings_class)
    file = _file(settings_class, {**environment, **flags}.get("config"))
    sources: dict[str, Source] = dict.fromkeys(settings_class.model_fields, "default")
    sources.update(dict.fromkeys(file, "file"))
    sources.update(dict.fromkeys(environment, "environment"))
    sources.update(dict.fromkeys(flags, "flag"))
    try:
        return _Loaded(settings_class(**{**file, **environment, **flags}), sources)
    except ValidationError as error:
        problems = "; ".join(_problem(details, settings_class, sources) for details in error.errors())
        raise BadSettings(problems) from None  # pydantic's own text shows values, and those may be secret


def _flags(settings_class: type[Settings], argv: Sequence[str]) -> dict[str, Any]:
    try:
        return CliSettingsSource[Any](
            settings_class,
            cli_parse_args=list(argv),
            cli_prog_name=settings_class.service,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_exit_on_error=False,
        )()
    except SettingsError as error:
        unknown = re.search(r"unrecognized arguments: ([^\s=]+)", str(error))
        if unknown is None:
            raise BadSettings(str(error).removeprefix("error parsing CLI: ")) from error
        if not unknown[1].startswith("-"):
            raise BadSettings(f"{unknown[1]} is not understood: settings are flags, and `config show` comes first") from None
        known = [f"--{name.replace('_', '-')}" for name in settings_class.model_fields]
        raise BadSettings(_unknown("flag", unknown[1], known)) from None


def _environment(settings_class: type[Settings]) -> dict[str, Any]:
    prefix = f"{_PREFIX}{settings_class.service.upper()}_"
    known = [prefix + name.upper() for name in settings_class.model_fields]
    for key in os.environ:
        if key.startswith(prefix) and key not in known and not _SERVICE_LINK.search(key):
            raise BadSettings(_unknown("environment variable", key, known))
    shared = EnvSettingsSource(settings_class, env_prefix=_PREFIX, case_sensitive=False, env_ignore_empty=True)()
    own = EnvSettingsSource(settings_class, env_prefix=prefix, case_sensitive=False, env_ignore_empty=True)()
    return {**{name: shared[name] for name in _SHARED if name in shared}, **own}


def _file(settings_class: type[Settings], path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = tomllib.loads(_read(Path(path), "config"))
    except tomllib.TOMLDecodeError as error:
        raise BadSettings(f"config: {path} is not TOML: {error}") from error
    known = [name for name in settings_class.model_fields if name != "config"]
    for key in values:
        if key not in known:
            raise BadSettings(f"{path}: {_unknown('key', key, known)}")
    return values


def _read(path: Path, setting: str) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings(f"{setting}: cannot read {path}: {getattr(error, 'strerror', 'not UTF-8')}") from error


def _unknown(kind: str, name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {kind} {name}, the nearest is {nearest[0]}"


def _problem(details: ErrorDetails, settings_class: type[Settings], sources: Mapping[str, Source]) -> str:
    message = details["msg"].removeprefix("Value error, ")
    if not details["loc"]:
        return message
    name = str(details["loc"][0])
    given = "" if _is_secret(settings_class, name) else f", not {details['input']!r}"
    return f"{name} ({sources[name]}): {message}{given}"


def _parts(value: str) -> list[str]:
    """What stands between the commas; nothing of an empty text."""
    return [part.strip() for part in value.split(",") if part.strip()]


def _is_list(settings_class: type[BaseSettings], name: str) -> bool:
    field = settings_class.model_fields.get(name)
    return field is not None and get_origin(field.annotation) in (tuple, list)


def _is_secret(settings_class: type[BaseSettings], name: str) -> bool:
    return "SecretStr" in str(settings_class.model_fields[name].annotation)


def _as_toml(loaded: _Loaded) -> str:
    lines = []
    for name, source in loaded.sources.items():
        value = getattr(loaded.settings, name)
        if value is None:
            lines.append(f"# {name} is not set")
        else:
            lines.append(f"{name} = {_toml_value(value)}  # {source}")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    """JSON writes these values as TOML does; a secret shows as asterisks, a path as text."""
    return json.dumps(value, default=str, ensure_ascii=False)
