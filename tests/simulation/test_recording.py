"""A recording says of every tree what the target would have accepted of it, and survives its file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.simulation.recordings import HORIZON, MACHINE, WIDTH, recording
from treewire.core.acceptance import accept
from treewire.core.build import build_tree
from treewire.core.tree import Marginals
from treewire.simulation.recorder import Observed, rows_of
from treewire.simulation.recording import NOT_PROPOSED, SHIPPED, Recording, RecordingError, Rounds


def test_a_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    """Every part, prices too."""
    saved = recording()
    saved.save(tmp_path / "rounds.npz")
    loaded = Recording.load(tmp_path / "rounds.npz")
    assert loaded.generations == saved.generations
    assert loaded.machine == MACHINE
    assert np.array_equal(loaded.log_probs, saved.log_probs)
    assert np.array_equal(loaded.choices, saved.choices)


def test_what_is_no_recording_is_refused_with_its_name(tmp_path: Path) -> None:
    """A text, a missing file and a damaged one."""
    (tmp_path / "text.npz").write_text("no archive")
    recording().save(tmp_path / "cut.npz")
    (tmp_path / "cut.npz").write_bytes((tmp_path / "cut.npz").read_bytes()[:200])
    for name in ("text.npz", "cut.npz", "missing.npz"):
        with pytest.raises(RecordingError, match=name):
            Recording.load(tmp_path / name)


def test_damage_anywhere_is_found_or_harmless(tmp_path: Path) -> None:
    """Whatever byte is another one: it can be read, or is refused as what it is."""
    path, refused = tmp_path / "rounds.npz", 0
    recording().save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        try:
            Recording.load(path)
        except RecordingError:
            refused += 1
    assert refused > len(whole) / 14


@pytest.mark.parametrize("width", [1, WIDTH])
def test_acceptance_is_that_of_the_walk(width: int) -> None:
    """For every row and budget as many tokens as the acceptance walk takes along the target's own choices."""
    recorded = recording(seed=3)
    rounds = Rounds(recorded, 40)
    for row in range(len(recorded.log_probs)):
        marginals = Marginals(
            np.tile(np.arange(width, dtype=np.int32), (HORIZON, 1)), recorded.log_probs[row, :, :width].astype(np.float32)
        )
        choices = [*recorded.choices[row].tolist(), NOT_PROPOSED]
        for budget in (1, 2, 5, 17, 40):
            tree = build_tree(0, marginals, budget).tree
            accepted = accept(tree, [choices[depth] for depth in tree.depths])
            assert rounds.tree(row, width).num_accepted(budget) == len(accepted.nodes) - 1
            assert rounds.tree(row, width).num_nodes(budget) == len(tree)


def test_rows_hold_the_ranks_of_what_came_next() -> None:
    """Token by token; what was not proposed is marked, and no row looks beyond the length that ends the output."""
    tokens = (5, 7, 9, 8)
    first = Marginals.from_rows([[(7, -0.1), (1, -3.0)], [(2, -0.2), (9, -2.0)], [(3, -0.2), (4, -2.0)]])
    second = Marginals.from_rows([[(1, -0.1), (9, -3.0)], [(8, -0.2), (2, -2.0)], [(3, -0.2), (4, -2.0)]])
    last = Marginals.from_rows([[(8, -0.1), (9, -3.0)], [(1, -0.2), (2, -2.0)], [(3, -0.2), (4, -2.0)]])
    observed = Observed(3, tokens, (first, second, last), (), (), ())
    log_probs, choices = rows_of(observed, horizon=3, max_tokens=4)
    assert choices.tolist() == [
        [0, 1, NOT_PROPOSED],
        [1, NOT_PROPOSED, NOT_PROPOSED],
        [NOT_PROPOSED, NOT_PROPOSED, NOT_PROPOSED],
    ]
    assert (log_probs[0, 2] == -np.inf).all()
    assert (log_probs[2] == -np.inf).all()
    unlimited, chosen = rows_of(observed, horizon=3, max_tokens=100)
    assert chosen[1].tolist() == [1, 0, NOT_PROPOSED]
    assert np.isfinite(unlimited[0, 2, :2]).all()


def test_the_shipped_recording_is_of_the_default_model_and_small() -> None:
    """It can be replayed as it is, and the package stays light."""
    shipped = Recording.load(SHIPPED)
    assert shipped.target == "smollm2-135m"
    assert shipped.num_tokens > 1000
    assert SHIPPED.stat().st_size < 400 * 1024
