"""Write into the tables of README.md and notebooks/RESULTS.md what the committed logs say.

    python tests/fill_tables.py

A row is known by how it begins (a claim, a correction, a row of the bench), and keeps its words:
only its last cells are written. tests/test_experiments.py holds the files to it.
"""

import contextlib
import inspect
import io
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
import dlc  # noqa: E402

import experiments  # noqa: E402
import report  # noqa: E402

FILES = [f for f in (ROOT / "README.md", ROOT / "notebooks" / "RESULTS.md") if f.exists()]
# Which of a claim's measured lines are shown, where not all.
SHOWN = {"C7": (0, 2, 3, 5, 6, 8, 9), "O2": (1, 3), "O5": (1, 2, 3, 4, 5), "O6": (0, 1),
         "O9": (0, 1, 2, 3, 4)}
BENCH = {  # how a row begins there, and how its numbers do in data/bench.json
    "RL step, tiny": ["RL step, tiny"], "the same, SmolLM2": ["RL step, smollm2"],
    "a step of": ["step, tiny default"], "loss at": ["loss"], "FP8 KV": ["KV bytes", "decode"],
    "rollouts": ["rollouts, tiny default, 256", "rollouts, smollm2"], "an admission": ["admission"]}


def claims():
    """Verdict, and the lines that are shown."""
    for name, word, lines in experiments.verdicts():
        shown = [lines[i] for i in SHOWN.get(name, range(len(lines))) if i < len(lines)]
        yield f"{name} |", [word, "; ".join(shown)]


def corrections():
    """The exact bias of the last table of `dlc.py --bias`, and the grid's cell with both gaps, of π
    and of q; until that is run, the cell of the sums."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        dlc.bias_tables()
    for line in text.getvalue().split("\n\n")[-1].splitlines()[2:]:
        c, bias, *_ = line.split()
        try:
            both = [experiments.cell("both", c, key) for key in experiments.KEYS[:2]]
        except FileNotFoundError:
            sums = experiments.SUMS + "compare"
            both = [experiments.cell("both", c, key, sums) for key in experiments.KEYS[:2]]
        yield f"[`{c}`]", [bias, *map(experiments.pm, both)]

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
    correction or function that is a link leading to its line."""
    lines = []
    for line in text.split("\n"):
        for begins, last in cells.items():
            if line.startswith(f"| {begins}"):
                kept = line.removesuffix(" |").split(" | ")[: -len(last)]
                line = " | ".join(kept + last) + " |"
        lines.append(line)
    link = re.compile(r"\[`(\w+)`\]\(((?:\.\./)?dlc\.py)#L\d+\)")
    return link.sub(lambda m: f"[`{m[1]}`]({m[2]}#L{line_of(m[1])})", "\n".join(lines))


def line_of(name):
    function = dlc.CORRECTIONS.get(name) or getattr(dlc, name)
    return inspect.getsourcelines(function)[1]


def cells(path):
    """What the tables of a file say."""
    if path.name == "README.md":
        return dict(corrections())
    return dict([*claims(), *report.grid_table(), *report.centring_table(), *bench()])


if __name__ == "__main__":
    for path in FILES:
        path.write_text(refilled(path.read_text(), cells(path)))
