"""Execute the six notebooks from fresh kernels; exit status 1 if one raises or takes above 120 s.

    python tests/run_notebooks.py             # in memory; nothing is written
    python tests/run_notebooks.py --write     # and keep the outputs: a script or a log has changed
    python tests/run_notebooks.py 04 06       # those alone

Figures are kept as PNGs of 64 colours, a third of the bytes, so that each file stays under 300 KB.
"""

import argparse
import base64
import io
import os
import sys
import time
from pathlib import Path

import nbclient
import nbformat
from PIL import Image

os.environ["OMP_NUM_THREADS"] = "1"  # the kernels inherit it
NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"
LIMIT = 120  # seconds a notebook


def tidy(nb):
    """One stream a cell instead of a piece a flush, small figures, nothing of the machine."""
    for cell in (c for c in nb.cells if c.cell_type == "code"):
        merged = []
        for out in cell.outputs:
            last = merged[-1] if merged else {}
            if out.output_type == last.get("output_type") == "stream" and out.name == last.name:
                last.text += out.text
            else:
                merged.append(out)
            if "image/png" in out.get("data", {}):
                image = Image.open(io.BytesIO(base64.b64decode(out.data["image/png"])))
                image, small = image.convert("RGB"), io.BytesIO()
                image.quantize(64, dither=Image.Dither.NONE).save(small, "png", optimize=True)
                out.data["image/png"] = base64.b64encode(small.getvalue()).decode()
        cell.outputs = merged
        cell.metadata.pop("execution", None)
    nb.metadata["language_info"] = dict(name="python")


def execute(path, write=False):
    """Seconds that the notebook took. Raises CellExecutionError, or TimeoutError: a slow cell."""
    nb, start = nbformat.read(path, 4), time.perf_counter()
    kernel = dict(metadata=dict(path=str(NOTEBOOKS)))
    nbclient.NotebookClient(nb, timeout=LIMIT, kernel_name="python3", resources=kernel).execute()
    seconds = time.perf_counter() - start
    if write:
        tidy(nb)
        nbformat.write(nb, path)
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*",
                        help="the first letters of a notebook's name (default: all six)")
    parser.add_argument("--write", action="store_true", help="keep the outputs")
    args = parser.parse_args()
    bad = 0
    for path in sorted(NOTEBOOKS.glob("0*.ipynb")):
        if args.names and not path.name.startswith(tuple(args.names)):
            continue
        try:
            seconds = execute(path, args.write)
        except (nbclient.exceptions.CellExecutionError, TimeoutError) as e:
            print(f"{path.name:32} FAILED\n{str(e)[-2000:]}", flush=True)
            bad += 1
            continue
        print(f"{path.name:32}{seconds:6.1f} s" + " TOO SLOW" * (seconds > LIMIT), flush=True)
        bad += seconds > LIMIT
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main())
