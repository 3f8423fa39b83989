"""Write into the tables of README.md and notebooks/RESULTS.md what the committed logs say.

    python tests/fill_tables.py

A row is known by how it begins (a claim, a correction, a row of the bench), and keeps its words:
only its last cells are written. tests/test_experiments.py holds the files to it.
"""

import contextlib
import importlib.util
import inspect
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import dlc  # noqa: E402

spec = importlib.util.spec_from_file_location("experiments", ROOT / "notebooks" / "experiments.py")
experiments = importlib.util.module_from_spec(spec)
spec.loader.exec_module(experiments)

FILES = [f for f in (ROOT / "README.md", ROOT / "notebooks" / "RESULTS.md") if f.exists()]
# Which of a claim's measured lines are shown.
SHOWN = dict(C1=(2, 0), C2=(0,), C3=(0, 1), C4=(0,), C5=(1, 2), C6=(0, 1, 2), C7=(0, 4, 8),
             C8=(0, 1, 2), O1=(0, 1, 2), O2=(1, 3), O3=(0, 2, 3, 5, 6, 8), O4=(0, 1),
             O5=(2, 3, 4, 5), O6=(0,), O7=(0, 1, 2), O8=(0, 1, 2, 3), O9=(1, 2, 3, 4, 6))
BENCH = {  # how a row begins there, and how its numbers do in data/bench.json
    "RL step, tiny": ["RL step, tiny"], "the same, SmolLM2": ["RL step, smollm2"],
    "a step of": ["step, tiny default"], "loss at": ["loss"], "FP8 KV": ["KV bytes", "decode"],
    "rollouts": ["rollouts, tiny default, 256", "rollouts, smollm2"], "an admission": ["admission"]}


def claims():
    """Verdict, and the lines that are shown."""
    for name, word, lines in experiments.verdicts():
        shown = [lines[i] for i in SHOWN[name] if i < len(lines)]
        yield name, [word, "; ".join(shown)]


def corrections():
    """The exact bias of the last table of `dlc.py --bias`, and four columns of the grid."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        dlc.bias_tables()
    for line in text.getvalue().split("\n\n")[-1].splitlines()[2:]:
        c, bias, *_ = line.split()
        grid = [experiments.cell(regime, c) for regime in ("discrepancy", "lag", "both")]
        grid.append(experiments.cell("both", c, "accuracy_sampler"))
        yield f"[`{c}`]", [bias, *map(experiments.pm, grid)]


def bench():
    """Ratios, whether they meet their targets, shares of the physical limit."""
    rows = json.loads((ROOT / "notebooks" / "data" / "bench.json").read_text())
    for row, begins in BENCH.items():
        ratios, targets, shares = [], [], []
        for r in rows:
            if not r["what"].startswith(tuple(begins)) or not r["ratio"]:  # its peer was missing
                continue
            share = r["limit"] / r["ours"]
            ratios.append(f"{r['ratio']:.3g}")
            targets.append("-")
            if r["target"] is not None:
                targets[-1] = f"{r['target']:.3g} {'met' if r['met'] else '**not met**'}"
            shares.append(f"{1 / share if r['unit'] == 'tokens/s' else share:.1%}")
        yield row, ["; ".join(x) for x in (ratios, targets, shares)]


def refilled(text, cells):
    """`text` with `cells` (how a row begins -> its last cells) in its tables, and each name of a
    correction that is a link leading to its line."""
    lines = []
    for line in text.split("\n"):
        for begins, last in cells.items():
            if line.startswith(f"| {begins}"):
                kept = line.removesuffix(" |").split(" | ")[: -len(last)]
                line = " | ".join(kept + last) + " |"
        lines.append(line)
    at = {name: inspect.getsourcelines(function)[1] for name, function in dlc.CORRECTIONS.items()}
    link = re.compile(r"\[`(\w+)`\]\(((?:\.\./)?dlc\.py)#L\d+\)")
    return link.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{at[m[1]]})", "\n".join(lines))


def cells():
    return dict([*claims(), *corrections(), *bench()])


if __name__ == "__main__":
    found = cells()
    for path in FILES:
        path.write_text(refilled(path.read_text(), found))
