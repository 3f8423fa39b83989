"""The README shows what the committed logs say: claims are recomputed, compared word by word."""

import copy
import inspect
import json
import re
from pathlib import Path

import fill_tables
import torch
from fill_tables import ROOT, experiments, report
from matplotlib.axes import Axes

README = (ROOT / "README.md").read_text()


def test_tables_equal_the_logs():
    """Verdicts, rewards, exact biases, ratios, and the lines that the names lead to."""
    e = experiments
    results = len(e.CLAIMS) + 4 * len(e.dlc.CORRECTIONS) + len(e.CENTRED) + 7
    for path, rows in zip(fill_tables.FILES, (11, results), strict=True):
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


def test_curves_of_ones_own_runs(tmp_path, monkeypatch, capsys):
    """One picture of two runs; where the lag is 0, at a sync, there is a gap and no plunge."""
    monkeypatch.chdir(tmp_path)
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda ax, *a, **k: drawn.append(a) or plot(ax, *a, **k))
    for name, lags in dict(one=[0, 0.1, 0.2], two=[0, 0.3, 0]).items():
        rows = [dict(step=i, reward=0.5, discrepancy=0.01, lag=x, ess=1 - x, syncs=i,
                     accuracy_base=0.2) for i, x in enumerate(lags)]
        rows[-1]["accuracy"] = 0.7
        (tmp_path / name).mkdir()
        log = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / name / "metrics.jsonl").write_text(log)
    assert report.main(["one", "two"]) == 0
    assert Path("curves.png").read_bytes()[:4] == b"\x89PNG"
    found = [[str(x) for x in a[0]] for a in drawn if isinstance(a[0], list)]
    assert ["nan", "0.1", "0.2"] in found and ["nan", "0.3", "nan"] in found
    marks = [dict(zip(*a[:2])) for a in drawn if not isinstance(a[0], list)]
    assert marks == [{0: 0.2, 3: 0.7}] * 2
    assert report.main(["none"]) == 2 and "none/metrics.jsonl" in capsys.readouterr().err


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
    torch.manual_seed(0)  # of its digits
    exec(compile(code, "README.md", "exec"), space)
    assert len(code.splitlines()) <= 28 and space["q"].version > 0
    assert sum(space["seen"][-5:]) > sum(space["seen"][:5]) + 0.2


def test_the_share_of_drift_in_the_results():
    said = ", ".join(f"{x:.0%}" for x in report.drift_shares())
    assert f"`drift` is {said} of" in (ROOT / "notebooks" / "RESULTS.md").read_text()


def made_up(how):
    """Logs of the grid, of the bases and of `updates`, a run ending at what `how` says of its cell
    and seed."""
    e, base = experiments, [dict(cell=[i, "bf16"], sampled=0.1 + 0.02 * i) for i in range(2)]
    logs = dict(bases=base)
    for name in ("grid", "updates"):
        logs[name] = jobs = [job for s in range(e.SEEDS) for job in e.SWEEPS[name](s)]
        for job in jobs:
            seed = job["config"]["seed"]
            end = how(*job["cell"], seed) + 0.02 * (seed % 2) + 1e-3 * (seed // 2)
            job |= dict.fromkeys(e.KEYS, end) | dict(curves={})
    return lambda name: logs.get(name, [])


def held(monkeypatch, how, *claims):
    monkeypatch.setattr(experiments, "rows", made_up(how))
    return [getattr(experiments, c)("")[0] for c in claims]


def test_claims_of_the_grid_can_come_out_either_way(monkeypatch):
    """On made-up runs: what the papers say, the opposite, and nothing at all."""
    said = ("c2", "c3", "c3_short", "c6", "c6_updates", "c8")

    def theirs(regime, c, seed):
        if c in ("ppo_sampler", "ppo_anchor"):
            return 0.02
        return 0.2 if regime == "lag" and c in ("sc", "reinforce") or c == "sc" else 0.3

    def opposite(regime, c, seed):
        if c in ("sc", "reinforce") and regime != "discrepancy":
            return 0.4
        return 0.3 if c == "ppo_sampler" and regime == "discrepancy" else 0.05

    assert held(monkeypatch, theirs, *said[:-1]) == [3, 3, 3, 1, 1]
    assert held(monkeypatch, opposite, "c2", "c3", "c3_short") == [0, 0, 0]
    same = lambda regime, c, seed: 0.3
    assert held(monkeypatch, same, *said) == [2, 1, 2, 0, 0, 5]
    jitter = lambda regime, c, seed: 0.3 + 0.08 * ((seed * 7 + len(c)) % 5 - 2)
    assert held(monkeypatch, jitter, "c6", "c6_updates") == [0, 0]  # no reference is better
    worse = lambda regime, c, seed: 0.3 - 0.04 * (c in ("dlc", "sc"))  # sc: dlc when synchronous
    assert held(monkeypatch, worse, "c8") == [0]
    within = lambda regime, c, seed: 0.3 - 0.02 * (c in ("dlc", "sc"))
    assert held(monkeypatch, within, "c8") == [5]
    unsure = lambda regime, c, seed: 0.3 - 0.02 * (c in ("dlc", "sc")) * (seed % 3)
    assert held(monkeypatch, unsure, "c8") == [0]  # a mean within, but not the interval


def test_pairs_are_of_one_seed(monkeypatch):
    """Runs are logged as they end: their order in the log changes no paired interval."""
    how = lambda regime, c, seed: 0.1 * (seed % 4) + 0.03 * (c == "is")
    e, rows = experiments, made_up(how)("grid")
    late = [r for r in rows if r["cell"][1] == "is"][::-1]  # those of one cell the other way round
    rows = late + [r for r in rows if r not in late]
    monkeypatch.setattr(e, "rows", lambda name: rows)
    apart = e.less(e.cell("lag", "is"), e.cell("lag", "sc"))
    assert max(abs(x - 0.03) for x in apart) < 1e-9 and len(apart) == e.SEEDS


def test_intervals_and_shufflings():
    """Student's t by scipy's numbers, and permutation tests that see a difference or none."""
    e = experiments
    for n, t in {2: 12.706, 8: 2.365, 9: 2.306, 16: 2.131}.items():
        x = [float(i) for i in range(n)]
        assert abs(e.interval(x)[1] - t * e.stdev(x) / n**0.5) < 1e-12
    near, far = [0.1, 0.5, 0.3, 0.7], [0.11, 0.51, 0.31, 0.71]
    assert e.shuffled([near, far], paired=False) > 0.5
    eight = [i / 10 for i in range(8)]
    above = [x + 0.01 for x in eight]
    assert e.shuffled([eight, above], paired=True) < 0.05 < e.shuffled([eight, above], paired=False)
    assert e.shuffled([eight, [x + 2 for x in eight]], paired=False) < 0.001


def test_a_claim_can_fail(monkeypatch, capsys):
    """A lag that shrinks is no growing lag; a missing log is no verdict."""
    e, runs = experiments, copy.deepcopy(experiments.rows("sums/gaps"))  # read once and kept
    assert e.c1(e.SUMS)[0] >= 4
    for r in runs:
        r["curves"]["lag"] = r["curves"]["lag"][::-1]
    monkeypatch.setattr(e, "rows", lambda name: runs)
    assert e.c1(e.SUMS)[0] <= 2
    monkeypatch.setattr(e, "rows", lambda name: [])
    e.claims(None)
    assert "C1: not run" in capsys.readouterr().out


def test_a_sweep_under_way_gives_no_verdict(monkeypatch):
    """After one seed of every sweep: what was logged on the sums, or "not run"; never an error."""
    e, read = experiments, experiments.rows
    seed = dict(bases=read("bases"), probes=read("sums/probes"))
    monkeypatch.setattr(e, "rows", lambda name: seed.get(name, []))
    for name, jobs in e.SWEEPS.items():
        seed[name] = [job | dict(curves=dict(lag=[0.0] * 33)) for job in jobs(0)]
    monkeypatch.setattr(e, "rows", lambda name: seed[name] if name in seed else read(name))
    words = {name: word for name, word, _ in e.verdicts()}
    exact = {"C5", "O4", "O6", "O8 capacity"}  # need no runs
    assert all("on the sums" in w or w == "not run" for n, w in words.items() if n not in exact)
    assert {n for n, w in words.items() if w == "not run"} == {
        "C2", "C3", "C3 short", "C6", "C6 updates", "C7 length", "C8"}


def test_every_logged_run_is_one_that_its_command_makes():
    """Else the same command, said to run only what is missing, would run the rest again."""
    parts = ("cell", "config", "base", "teacher")
    key = lambda job: json.dumps([job.get(k) for k in parts], sort_keys=True)
    for name, jobs in experiments.SWEEPS.items():
        logged = [key(r) for r in experiments.rows(name)]
        if logged:
            made = {key(job) for seed in range(2 * experiments.SEEDS) for job in jobs(seed)}
            assert len(set(logged)) == len(logged) and set(logged) <= made, name


def test_every_sweep_makes_jobs_of_its_own(monkeypatch):
    """No two jobs of a sweep are the same, every option is one, and every base one of tiny_base."""
    recipes = [dict(cell=[pair, "recipe"], keep=["model.layers.0"]) for pair in experiments.SIZES]
    monkeypatch.setattr(experiments, "rows", lambda name: recipes)
    of = inspect.signature(experiments.dlc.tiny_base).parameters
    for name, jobs in experiments.SWEEPS.items():
        made = [job for seed in range(2) for job in jobs(seed)]
        names = [json.dumps([j["cell"], j["config"]["seed"]]) for j in made]
        assert made and len(set(names)) == len(names), name
        for job in made:
            module = experiments.opd if "teacher" in job else experiments.dlc
            module.check(module.Config(device="cpu", **job["config"]))
            assert {*job.get("base", {}), *job.get("teacher", {})} <= {*of}


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
