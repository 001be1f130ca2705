"""The token that services on one machine share."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from treewire.runtime.token import NUM_TOKEN_BYTES, ensure_token


def test_a_new_token_is_long_and_only_readable(tmp_path: Path) -> None:
    """The token has all its random bytes, and its file can be read by owner and group and written by nobody."""
    path = tmp_path / "token"
    assert ensure_token(path)
    assert len(path.read_text()) > NUM_TOKEN_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o440


def test_a_token_that_is_there_stays(tmp_path: Path) -> None:
    """A second start of the stack keeps the token of the first, and leaves nothing else behind."""
    path = tmp_path / "token"
    ensure_token(path)
    token = path.read_text()
    assert not ensure_token(path)
    assert path.read_text() == token
    assert list(tmp_path.iterdir()) == [path]


def test_of_many_at_once_one_draws(tmp_path: Path) -> None:
    """Of starters that race, exactly one draws the token."""
    path = tmp_path / "token"
    with ThreadPoolExecutor(max_workers=8) as pool:
        drew = list(pool.map(ensure_token, [path] * 32))
    assert drew.count(True) == 1


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    """A token that cannot be written is not passed over."""
    with pytest.raises(FileNotFoundError):
        ensure_token(tmp_path / "missing" / "token")
