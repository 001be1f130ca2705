"""This file is who may call: the service's token, and a file of keys that is read again whenever it changes.

    [alice]
    key = "sk-..."            # or sha256 = "<hexadecimal digest of the key>"
    max_running = 4           # optional limits: see CallerLimits
    requests_per_minute = 60

Keys are kept as digests: what is compared is not the secret, so the time a comparison takes tells nothing of it.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr, ValidationError

from treewire.errors import Unauthenticated
from treewire.runtime.calls import Caller, CallerLimits
from treewire.runtime.logging import get_logger

_SCHEME = "Bearer "
_DIGEST_DIGITS = 64
_log = get_logger()


class BadKeys(Exception):
    """The file of keys cannot be used; the message names file and section, never a key."""


class _Section(CallerLimits):
    """A caller in the file, as written."""

    key: SecretStr | None = None
    sha256: str | None = None

    def digest(self) -> str:
        """The digest of the key. ValueError unless exactly one of key and sha256 is given and usable."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("exactly one of key and sha256 is needed")
        if self.key is not None:
            if not self.key.get_secret_value().strip():
                raise ValueError("key is empty")
            return _digest(self.key.get_secret_value())
        assert self.sha256 is not None
        if len(self.sha256) != _DIGEST_DIGITS or set(self.sha256.lower()) - set("0123456789abcdef"):
            raise ValueError(f"sha256 must be {_DIGEST_DIGITS} hexadecimal digits")
        return self.sha256.lower()

    def limits(self) -> CallerLimits:
        """The limits alone."""
        return CallerLimits.model_validate(self.model_dump(exclude={"key", "sha256"}))


class Keys:
    """Tells callers by what they show. Everybody may call without a token and a file, or with `allow_anonymous`; who shows a
    key of the file is still known by it. Raises BadKeys if the file cannot be used; a file that becomes unusable later leaves
    the last keys valid.
    """

    def __init__(self, token: str | None = None, file: Path | None = None, *, allow_anonymous: bool = False) -> None:
        self._token_digest = None if token is None else _digest(token)
        self._file = file
        self._is_open = allow_anonymous or (token is None and file is None)
        self._seen = None if file is None else _stamp(file)
        self._callers: Mapping[str, Caller] = {} if file is None else read_keys(file)

    def caller(self, authorization: str | None) -> Caller:
        """The caller who shows this authorization header. Unauthenticated if nobody is known by it."""
        known = self._known(authorization)
        if known is not None:
            return known
        if self._is_open:
            return Caller()
        if authorization is None:
            raise Unauthenticated("no token: send the metadata authorization: Bearer TOKEN")
        raise Unauthenticated("the token is wrong")

    def _known(self, authorization: str | None) -> Caller | None:
        """The caller whose key or token it is; None if it is nobody's."""
        if authorization is None or not authorization.startswith(_SCHEME):
            return None
        digest = _digest(authorization.removeprefix(_SCHEME))
        self._reload()
        if digest == self._token_digest:
            return Caller()
        return self._callers.get(digest)

    def _reload(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None or (stamp := _stamp(self._file)) == self._seen:
            return
        self._seen = stamp
        try:
            self._callers = read_keys(self._file)
        except BadKeys as error:
            _log.warning("keys not reloaded, the last ones stay valid", reason=str(error))
        else:
            _log.info("keys reloaded", callers=len(self._callers))


def read_keys(file: Path) -> Mapping[str, Caller]:
    """The callers of a file by the digest of their keys. Raises BadKeys."""
    try:
        sections = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadKeys(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    callers: dict[str, Caller] = {}
    for name, values in sections.items():
        digest, caller = _entry(file, name, values)
        if digest in callers:
            raise BadKeys(f"{file}: [{name}] has the key of [{callers[digest].name}]")
        callers[digest] = caller
    return callers


def _entry(file: Path, name: str, values: Any) -> tuple[str, Caller]:
    try:
        section = _Section.model_validate(values)
        return section.digest(), Caller(name, section.limits())
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'section'}: {each['msg']}" for each in error.errors())
        raise BadKeys(f"{file}: [{name}] {problems}") from None
    except ValueError as error:
        raise BadKeys(f"{file}: [{name}] {error}") from None


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """What changes when the file does; None if there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
