"""Who may call: tokens, keys of a file, and files that cannot be used."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from treewire.errors import Unauthenticated
from treewire.runtime.calls import Caller
from treewire.runtime.keys import BadKeys, Keys

DIGEST = hashlib.sha256(b"bob-secret").hexdigest()


def keys_file(folder: Path, text: str) -> Path:
    file = folder / "keys.toml"
    file.write_text(text)
    return file


def test_callers_are_known_by_key_or_digest(tmp_path: Path) -> None:
    """A key in clear, a digest of one, and the service's token beside them; nobody else."""
    file = keys_file(tmp_path, f'[alice]\nkey = "alice-secret"\nmax_running = 3\n[bob]\nsha256 = "{DIGEST.upper()}"\n')
    keys = Keys("service-token", file)
    assert keys.caller("Bearer alice-secret").name == "alice"
    assert keys.caller("Bearer alice-secret").limits.max_running == 3
    assert keys.caller("Bearer bob-secret").name == "bob"
    assert keys.caller("Bearer service-token") == Caller()
    strange = ("", "alice-secret", "Basic alice-secret", "Bearer ", "Bearer Alice-secret", f"Bearer {DIGEST}", "Bearer é")
    for shown in (None, *strange):
        with pytest.raises(Unauthenticated) as caught:
            keys.caller(shown)
        assert "secret" not in caught.value.message


def test_nobody_is_asked_where_there_is_nothing_to_show(tmp_path: Path) -> None:
    """Without token and file, and where anonymous callers are allowed; a known key still tells its caller."""
    assert Keys().caller(None) == Keys().caller("Bearer anything") == Caller()
    keys = Keys("token", keys_file(tmp_path, '[alice]\nkey = "a"\n'), allow_anonymous=True)
    assert keys.caller(None) == keys.caller("Bearer wrong") == Caller()
    assert keys.caller("Bearer a").name == "alice"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[alice", "Expected ']'"),
        ("[alice]\n", "exactly one of key and sha256 is needed"),
        ('[alice]\nkey = "x"\nsha256 = "y"\n', "exactly one of key and sha256 is needed"),
        ('[alice]\nkey = " "\n', "key is empty"),
        ('[alice]\nsha256 = "top-secret"\n', "sha256 must be 64 hexadecimal digits"),
        ('[alice]\nkey = "top-secret"\nmax_runnning = 1\n', "max_runnning: Extra inputs are not permitted"),
        ('[alice]\nkey = "top-secret"\nmax_running = 0\n', "max_running: Input should be greater than or equal to 1"),
        ('alice = "top-secret"\n', "[alice] section: Input should be"),
        ('[alice]\nkey = "top-secret"\n[bob]\nkey = "top-secret"\n', "[bob] has the key of [alice]"),
    ],
)
def test_files_that_cannot_be_used_are_refused_without_telling_a_key(tmp_path: Path, text: str, message: str) -> None:
    """File, section and what is wrong with it."""
    with pytest.raises(BadKeys) as caught:
        Keys(file=keys_file(tmp_path, text))
    assert message in str(caught.value)
    assert "keys.toml" in str(caught.value)
    assert "top-secret" not in str(caught.value)
    with pytest.raises(BadKeys, match="No such file"):
        Keys(file=tmp_path / "none.toml")
