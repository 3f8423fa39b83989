"""The README shows what the committed logs say: claims are recomputed, compared word by word."""

import copy
import re

import fill_tables
from fill_tables import ROOT, experiments

README = (ROOT / "README.md").read_text()


def test_tables_equal_the_logs():
    """Verdicts, accuracies, exact biases, ratios, and the lines that the names lead to."""
    for path, rows in zip(fill_tables.FILES, (11, 17 + 11 + 7), strict=True):
        cells, text = fill_tables.cells(path), path.read_text()
        missing = [begins for begins in cells if f"\n| {begins}" not in text]
        assert len(cells) == rows and not missing, missing
        assert fill_tables.refilled(text, cells) == text, "run python tests/fill_tables.py"


def test_readme_is_true_of_the_files():
    """Line counts, links and pictures, and the length that it may have."""
    assert len(README.split()) <= 2600 and len(README.encode()) <= 16 * 1024
    prose = [line for line in README.splitlines() if not line.startswith("|")]
    assert all(len(line) <= 400 for line in prose)
    setup = [line for line in README.splitlines()[:20] if line.startswith("pip install -r")]
    assert len(setup) == 2
    targets = re.findall(r"\]\(([^)#]*)(?:#[^)]*)?\)", README)
    files = [t for t in targets if not t.startswith("http")]
    assert len(targets) > 15 and all((ROOT / t).exists() for t in files)
    for name, line in re.findall(r"\[`(\w+)`\]\(dlc\.py#L(\d+)\)", README):
        at = (ROOT / "dlc.py").read_text().splitlines()[int(line) - 1]
        assert at.startswith("def " + ("importance" if name == "is" else name) + "("), name


def test_the_readme_s_loop_learns(made_base, tmp_path, monkeypatch):
    """The example for one's own loop, as it stands: its reward rises, and the sampler syncs."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"^```python\n(.*?)^```", README, re.M | re.S)[1]
    base = re.search(r'load_model\("(.*?)"', code)[1]
    (tmp_path / base).parent.mkdir()
    (tmp_path / base).symlink_to(made_base())
    noted = "    seen.append(float(R.mean()))\n    loss.backward()"
    code = code.replace("    loss.backward()", noted)
    space = dict(seen=[])
    exec(compile(code, "README.md", "exec"), space)
    assert len(code.splitlines()) <= 28 and space["q"].version > 0
    assert sum(space["seen"][-5:]) > sum(space["seen"][:5]) + 0.5


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


def test_every_run_of_the_sweeps_is_logged():
    """Else the same command, said to run only what is missing, would run the rest again."""
    parts = lambda job: [job.get(k) for k in ("cell", "config", "base", "teacher")]
    for name, jobs in experiments.SWEEPS.items():
        logged = [parts(r) for r in experiments.rows(name)]
        wanted = [parts(job) for seed in range(experiments.SEEDS) for job in jobs(seed)]
        assert not [job for job in wanted if job not in logged], name


def test_a_job_of_each_kind_is_run_and_logged(tmp_path, monkeypatch):
    """Also by the clock, whose second run gives the accuracies of the first."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(experiments, "DATA", tmp_path)
    small = dict(base=dict(steps=2), teacher=dict(steps=3), thin=1)
    rl = dict(steps=3, prompts=2, correction="dlc", lag=1)
    kinds = [dict(cell=["a"], config=rl, **small), dict(cell=["b"], config=dict(loss="full") | rl)]
    del kinds[0]["teacher"]
    kinds[1] |= small
    for job in kinds:
        row = experiments.one_run(job)
        assert row["syncs"] == 2 and 0 <= row["accuracy"] <= 1
        assert {len(x) for x in row["curves"].values()} == {3}
        assert set(row["curves"]) > {"reward", "ess", "ess_1", "ess_4"}
        experiments.append("some", row)
    assert [r["cell"] for r in experiments.rows("some")] == [["a"], ["b"]]
    assert "accuracy_teacher" in experiments.rows("some")[1]

    base = str(experiments.dlc.tiny_base(2))
    how = dict(steps=20, prompts=2, correction="dlc", base=base)
    row = experiments.timed("rl", "async bf16, lag 1", how)
    assert [p[0] for p in row["points"]] == [9, 19] and row["points"][1][2] == row["accuracy"]
    assert 0 < row["points"][0][1] < row["points"][1][1] and row["wait"] >= 0


def test_cells_that_are_equal_by_identity_are_equal(tmp_path, monkeypatch):
    """The grid runs one of each such pair; here both are run, for a few steps: the same numbers."""
    import dlc

    monkeypatch.chdir(tmp_path)
    base = str(dlc.tiny_base(2))
    clock = ("seconds_sample", "seconds_wait", "seconds_train", "tokens_per_second")
    for regime, pairs in experiments.SAME.items():
        how = experiments.REGIMES[regime] | dict(steps=3, prompts=4, lr=1e-3, device="cpu")
        for name, twin in pairs.items():
            a, b = (dlc.train(dlc.Config(correction=c, base=base, **how)) for c in (name, twin))
            for x, y in zip(a, b):
                for k in set(x) - {"clip_share", "weight_max", *clock}:
                    same = x[k] == y[k]
                    near = same or isinstance(x[k], float) and (
                        abs(x[k] - y[k]) <= 1e-4 * abs(y[k]) + 1e-6)
                    assert near, (regime, name, k)
