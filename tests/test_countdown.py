"""The worked example of --reward: what it gives, and a run with it."""

import json
from pathlib import Path

import pytest

import dlc

FILE = str(Path(dlc.__file__).parent / "notebooks" / "countdown.py")
ROW = dict(prompt="3+5+9=", answer="9*5-3", numbers=[3, 5, 9], target=42)


@pytest.mark.parametrize("text, want", [
    ("9*5-3", 1), (" (9 * 5) - 3 = 42\nand so on", 1), ("9*5-3 = 41", 1), ("9+5-3", 0.1),
    ("9*5", 0), ("42", 0), ("9*5-3-3+3", 0), ("9*5-3.0", 0), ("9**5-3", 0), ("9/(5-5)-3", 0),
    ("__import__('os').getcwd()", 0), ("", 0), ("9*5-", 0), ("(" * 5000, 0), ("True*9*5-3", 0)])
def test_countdown(text, want):
    assert dlc.reward_of(FILE)(text, ROW, True) == want


def test_a_run_takes_it(quick_base, tmp_path, monkeypatch):
    """A data file's own keys reach the function; the base writes no expression, and that is 0."""
    rows = [ROW | dict(prompt=f"3+5+{i}=", numbers=[3, 5, i]) for i in range(9)]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = dlc.train(dlc.Config(
        base=str(quick_base), data=str(data), reward=FILE, steps=1, prompts=2, group_size=2,
        device="cpu", max_new_tokens=4, out=str(tmp_path / "run")))
    assert found[0]["reward"] == 0 and found[0]["sample"]["answer"] == "9*5-3"
