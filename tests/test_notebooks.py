"""The notebooks as files: valid, executed in order, small, and of one shape; the exercises' checks
tell their solutions from wrong answers; and the bugs of notebook 6 are bugs, whose solutions solve
them. Here only the cells that an exercise needs are run, those tagged `setup`;
tests/run_notebooks.py executes everything."""

import contextlib
import io
import re
from pathlib import Path

import matplotlib
import nbformat
import pytest
from matplotlib import pyplot as plt

matplotlib.use("Agg")

ROOT = Path(__file__).resolve().parent.parent
PATHS = sorted((ROOT / "notebooks").glob("*.ipynb"))
SOLUTION = r"<details><summary>{} (\d)</summary>.*?```python\n(.*?)```\s*</details>"
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
        exec(source.replace("%matplotlib inline\n", ""), names)  # noqa: S102
    return shown.getvalue()


@pytest.fixture
def lesson(monkeypatch):
    """Notebooks import lesson.py, which works in the repository's folder, in one thread."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    with plt.rc_context():
        yield
    plt.close("all")


WRONG = {  # plausible answers that a check must refuse
    ("01", "1"): "def sequence_weight(logp, logq):\n    return (logq - logp).exp()",
    ("01", "2"): "b = float((joint(q).exp() * R).sum())",  # the mean reward under q
    ("02", "1"): "keep = ['model.layers.0.mlp']",  # the other half
    ("02", "2"): "def e4m3(x):\n    return x.bfloat16().float()",  # seven bits, not three
    ("03", "1"): "def truncated_lag(logp, logq, **_):\n"
                 "    return dlc.ratio(logp, logq).clamp_max(1.2), None, None",  # both gaps
    ("03", "2"): "changes = dict(logp_stale=policies['logq'])",
    ("04", "1"): "def tokens_to_half(s):\n    return 0.5 / s**2",
    ("04", "2"): "N = next(k for k, x in enumerate(mean_ess) if x < 0.5) + 1",
    ("05", "1"): "def reverse_kl(student_logits, teacher_logits):\n"
                 "    return opd.divergence('forward', student_logits, teacher_logits)",
    ("05", "2"): "mine = dict(weights='int3', kv='fp8')",  # above the budget
}


@pytest.mark.parametrize("path", PATHS[:5], ids=lambda p: p.stem)
def test_an_exercise_s_check_tells_its_solution_from_a_wrong_answer(path, lesson):
    nb, names = nbformat.read(path, 4), {}
    tagged = [(tag, c.source) for c in code(nb) for tag in c.metadata.get("tags", [])]
    part = dict(tagged)
    solutions = dict(re.findall(SOLUTION.format("Exercise"), words(nb)[-1], re.S))
    assert set(part) == {"setup", "exercise-1", "check-1", "exercise-2", "check-2"}
    assert list(solutions) == ["1", "2"]
    for tag, source in tagged:
        if tag == "setup":
            run(source, names)
    for i, solution in solutions.items():
        judged = lambda: run(part[f"check-{i}"], names)
        verdict = lambda: re.search(rf"^exercise {i}: (\w+)", judged(), re.M)[1]
        run(part[f"exercise-{i}"], names)
        assert verdict() == "TODO"
        run(WRONG[path.stem[:2], i], names)
        assert verdict() == "FAIL"
        run(solution, names)
        assert verdict() == "PASS"


def test_every_bug_fails_as_shipped_and_passes_with_its_solution(lesson):
    nb = nbformat.read(ROOT / "notebooks" / "06_find_the_bug.ipynb", 4)
    tagged = {tag: c.source for c in code(nb) for tag in c.metadata.get("tags", [])}
    assert set(tagged) == {f"{kind}-{i}" for kind in ("bug", "check") for i in range(1, 8)}
    solutions = re.findall(SOLUTION.format("Bug"), words(nb)[-1], re.S)
    assert [i for i, _ in solutions] == list("1234567")
    seen = re.findall(r"\(https://github.com/[\w-]+/[\w-]+/(?:pull|issues)/\d+\)", words(nb)[-1])
    assert len(set(seen)) == 7  # a public place for each

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
