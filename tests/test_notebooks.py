"""The notebooks as files: valid, executed in order, small, and of one shape; and the bugs of
notebook 6 are bugs, whose solutions solve them. Nothing heavy is executed here:
tests/run_notebooks.py does that."""

import contextlib
import io
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
EACH = pytest.mark.parametrize("path", PATHS, ids=lambda p: p.stem)


def code(nb):
    return [c for c in nb.cells if c.cell_type == "code"]


def words(nb):
    return [c.source for c in nb.cells if c.cell_type == "markdown"]


def test_there_are_six():
    assert [p.stem for p in PATHS] == [
        "01_three_policies", "02_quantised_sampler", "03_corrections", "04_lag_and_resync",
        "05_on_policy_distillation", "06_find_the_bug"]


@EACH
def test_valid_executed_in_order_and_small(path):
    nb = nbformat.read(path, 4)
    nbformat.validate(nb)
    assert [c.execution_count for c in code(nb)] == list(range(1, len(code(nb)) + 1))
    outputs = [o for c in code(nb) for o in c.outputs]
    assert outputs and not [o for o in outputs if o.output_type == "error"]
    assert not [o.text for o in outputs if o.output_type == "stream" and o.name == "stderr"]
    assert path.stat().st_size < 300 * 1024
    assert max(len(c.source.splitlines()) for c in code(nb)) <= 25


@EACH
def test_question_prediction_what_you_can_say_exercises(path):
    nb = nbformat.read(path, 4)
    first, rest = words(nb)[0], "\n".join(words(nb)[1:])
    assert first.startswith("# ") and "Question" in first and "?" in first and "Prediction" in first
    at = [rest.index(title) for title in ("## What you can now say", "## Exercises")]
    assert at == sorted(at)
    shown = "".join(o.text for c in code(nb) for o in c.outputs if o.output_type == "stream")
    unsolved = re.findall(r"^exercise (\d): (?:TODO|FAIL)", shown, re.M)
    assert unsolved == ["1", "2"]


@EACH
def test_shows_the_scripts_instead_of_copying_them(path):
    """No function of a script is defined again, but for those that notebook 6 breaks on purpose."""
    source = "\n".join(c.source for c in code(nbformat.read(path, 4)))
    assert "import dlc" in source
    if path.stem[:2] != "06":
        assert "inspect.getsource(" in source
        scripts = "".join((ROOT / f"{name}.py").read_text() for name in ("sampler", "dlc", "opd"))
        body = lambda text: {line.strip() for line in text.splitlines() if len(line.strip()) > 50}
        assert not body(source) & body(scripts)


@EACH
def test_words(path):
    text = "\n".join(c.source for c in nbformat.read(path, 4).cells)
    assert not re.search(r"\bold\b", text, re.I)


def test_the_figure_of_the_readme():
    assert 0 < (ROOT / "notebooks" / "figures" / "three_policies.png").stat().st_size <= 120 * 1024


def run(source, names):
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(source, names)  # noqa: S102
    return shown.getvalue()


def test_every_bug_fails_as_shipped_and_passes_with_its_solution(monkeypatch):
    monkeypatch.chdir(ROOT)
    nb = nbformat.read(ROOT / "notebooks" / "06_find_the_bug.ipynb", 4)
    tagged = {tag: c.source for c in code(nb) for tag in c.metadata.get("tags", [])}
    assert set(tagged) == {f"{kind}-{i}" for kind in ("bug", "check") for i in range(1, 8)}
    fold = r"<details><summary>Bug (\d)</summary>.*?```python\n(.*?)```\s*</details>"
    solutions = re.findall(fold, words(nb)[-1], re.S)
    assert [i for i, _ in solutions] == list("1234567")

    names = {}
    for cell in code(nb):
        if cell.metadata.get("tags"):
            break
        run(cell.source, names)
    for i, solution in solutions:
        run(tagged[f"bug-{i}"], names)
        assert run(tagged[f"check-{i}"], names).startswith(f"bug {i}: FAIL"), i
        name = re.search(r"^def (\w+)", tagged[f"bug-{i}"], re.M)[1]
        names[name] = lambda *args: 1 / 0
        assert run(tagged[f"check-{i}"], names).startswith(f"bug {i}: FAIL"), i  # never raises
        del names[name]
        run(solution, names)
        assert name in names and run(tagged[f"check-{i}"], names).startswith(f"bug {i}: PASS"), i
