"""Scripts importable from the tests; one thread, so that a busy machine slows the tests and does not stop them."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def quick_base(tmp_path_factory):
    """Folder of a tiny base of two steps: it answers nothing, and is made in a second."""
    import torch

    import dlc

    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as m:
        m.chdir(tmp_path_factory.mktemp("base"))
        return dlc.tiny_base(steps=2).resolve()
