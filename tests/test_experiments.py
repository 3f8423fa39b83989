"""The README shows what the committed logs say: claims are recomputed, compared word by word."""

import copy
import importlib.util
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
spec = importlib.util.spec_from_file_location("experiments", ROOT / "notebooks" / "experiments.py")
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)


def test_readme_equals_the_logs(capsys):
    """Its three tables word by word: formulas, exact biases, accuracies, verdicts, ratios, and the
    lines that the names lead to."""
    experiments.readme(None)
    tables = capsys.readouterr().out.rstrip("\n").split("\n\n")
    assert len(tables) == 3 and "| C5 |" in tables[1]
    told = "python notebooks/experiments.py readme prints what belongs there"
    assert all(table in README for table in tables), told


def test_readme_is_true_of_the_files():
    """Line counts, links and pictures, and the length that it may have."""
    assert 150 <= len(README.splitlines()) <= 250
    for name, lines in re.findall(r"^\| `(\w+\.py)` \| (\d+) \|", README, re.M):
        assert int(lines) == len((ROOT / name).read_text().splitlines()), name
    targets = re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", README)
    files = [t for t in targets if not t.startswith("http")]
    assert len(targets) > 15 and all((ROOT / t).exists() for t in files)
    for name, line in re.findall(r"\[`(\w+)`\]\(dlc\.py#L(\d+)\)", README):
        at = (ROOT / "dlc.py").read_text().splitlines()[int(line) - 1]
        assert at.startswith("def " + ("importance" if name == "is" else name) + "("), name


def test_a_claim_can_fail(monkeypatch, capsys):
    """A lag that shrinks is no growing lag; a missing log is no verdict."""
    runs = copy.deepcopy(experiments.rows("gaps"))  # they are read once and kept
    for r in runs:
        r["curves"]["lag"] = r["curves"]["lag"][::-1]
    monkeypatch.setattr(experiments, "rows", lambda name: runs)
    assert experiments.c1()[0] == 0
    monkeypatch.setattr(experiments, "rows", lambda name: [])
    experiments.claims(None)
    assert "C1 not run" in capsys.readouterr().out


def test_cells_that_are_equal_by_identity_are_equal(tmp_path, monkeypatch):
    """The grid runs one of each such pair; here both are run, for a few steps: the same numbers."""
    import dlc

    monkeypatch.chdir(tmp_path)
    base = dlc.tiny_base(2)
    monkeypatch.setattr(dlc, "tiny_base", lambda: base)
    quiet = ("seconds_sample", "seconds_train", "tokens_per_second", "clip_share", "weight_max")
    for regime, pairs in experiments.SAME.items():
        how = experiments.REGIMES[regime] | dict(steps=3, prompts=4, lr=1e-3, device="cpu")
        for name, twin in pairs.items():
            a, b = (dlc.train(dlc.Config(correction=c, **how)) for c in (name, twin))
            for x, y in zip(a, b):
                for k in set(x) - set(quiet):
                    same = x[k] == y[k]
                    assert same or abs(x[k] - y[k]) <= 1e-4 * abs(y[k]) + 1e-6, (regime, name, k)
