"""This file is the reference of all settings, made of the settings themselves.

python -m treewire.runtime.reference > docs/configuration.md
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from treewire.runtime.calls import CallerLimits
from treewire.runtime.settings import ServiceSettings

SERVICES = (
    "gateway.settings:GatewaySettings",
    "draft_service.settings:DraftSettings",
    "verify_service.settings:VerifySettings",
)
_HEAD = """\
# Settings

<!-- Made by `python -m treewire.runtime.reference`; a test compares. -->

Every setting of a service can be given as a flag, as an environment variable, or as a key of the TOML file that `--config`
names; a flag wins over the environment, that over the file. What is unknown is refused with the nearest name. A service shows
what it would use, and where each value comes from, with `python -m gateway config show` (or `draft_service`, `verify_service`).

A flag is the name with dashes (`--max-running 64`; a switch is `--reflection on` or, for true and false, `--allow-anonymous`
and `--no-allow-anonymous`). The variable is `TREEWIRE_`, the service, and the name: `TREEWIRE_GATEWAY_MAX_RUNNING`.
`TREEWIRE_TOKEN` and `TREEWIRE_TOKEN_FILE` are read by every service."""
_TABLE = "| name | takes | default | meaning |\n|---|---|---|---|"
_WORDS = {bool: "true or false", int: "integer", float: "number", str: "text", Path: "path", SecretStr: "secret text"}
_BOUNDS = {"ge": "from {}", "gt": "above {}", "le": "to {}", "lt": "below {}"}


def reference(services: Sequence[type[ServiceSettings]]) -> str:
    """The page: what all services take, what each takes beside it, and the limits of callers in a keys file."""
    shared = {name: field for name, field in ServiceSettings.model_fields.items() if name != "bind"}
    parts = [_HEAD, "## All services", _table(shared)]
    for service in services:
        own = {name: field for name, field in service.model_fields.items() if name not in shared}
        parts += [f"## {service.service.capitalize()}", _table(own)]
    parts += ["## A caller in the keys file", "See [security](security.md).", _table(CallerLimits.model_fields)]
    return "\n\n".join(parts) + "\n"


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = (
        f"| `{name}` | {_taken(field)} | {_default(field)} | {_escaped(field.description or '')} |"
        for name, field in fields.items()
    )
    return "\n".join((_TABLE, *rows))


def _taken(field: FieldInfo) -> str:
    bounds = [
        words.format(f"{value:,}" if isinstance(value, int) else f"{value:g}")
        for constraint in field.metadata
        for name, words in _BOUNDS.items()
        if (value := getattr(constraint, name, None)) is not None
    ]
    return _escaped(" ".join((_type(field.annotation), *bounds)))


def _type(annotation: Any) -> str:
    """The type in words; "or None" is told by the default."""
    if get_origin(annotation) is Annotated:
        return _type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join(_type(each) for each in get_args(annotation) if each is not type(None))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{each}`" for each in get_args(annotation))
    if get_origin(annotation) in (tuple, list):
        return f"{_type(get_args(annotation)[0])}, more with commas between"
    return _WORDS[annotation]


def _default(field: FieldInfo) -> str:
    if field.default is None:
        return "unset"
    return "empty" if field.default == "" else f"`{json.dumps(field.default, default=str, ensure_ascii=False)}`"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(reference([resolve_name(name) for name in SERVICES]), end="")
