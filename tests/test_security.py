"""Nothing from outside is run: no pickle, no model code, no shell, no evaluation, no path followed
out of data. What pickles and model code do when they are tried is in test_bad_input.py: a line,
and no PWNED folder."""

import ast
import json
from pathlib import Path

import pytest

import dlc

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / x for x in ("dlc.py", "opd.py", "sampler.py", "notebooks/experiments.py")]
BUILTINS = {"eval", "exec", "compile", "__import__"}  # as bare names: model.eval is another
# As a module, an attribute or an argument:
BANNED = {"pickle", "cPickle", "dill", "joblib", "marshal", "shelve", "yaml", "system", "popen",
          "shell", "import_module", "execv", "execve", "spawnl", "hub"}


def faults(source):
    """What is unsafe in a script's source, as strings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found += [node.id] if node.id in BUILTINS | BANNED else []
        if isinstance(node, (ast.Attribute, ast.keyword)):
            name = node.attr if isinstance(node, ast.Attribute) else node.arg
            found += [name] if name in BANNED else []
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [a.name for a in node.names] + [getattr(node, "module", None) or ""]
            found += [m for m in modules if BANNED & set(m.split("."))]
        if not isinstance(node, ast.Call):
            continue
        call, how = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if call == "torch.load" and how.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if call.endswith(".from_pretrained"):
            if how.get("trust_remote_code") != "False":
                found.append(f"{call} without trust_remote_code=False")
            if "Model" in call and how.get("use_safetensors") != "True":
                found.append(f"{call} without use_safetensors=True")
        if how.get("trust_remote_code", "False") != "False":
            found.append(f"{call} trusts code")
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda p: p.name)
def test_no_script_can_run_what_it_reads(path):
    assert faults(path.read_text()) == []


@pytest.mark.parametrize("line", [
    "eval(x)", "exec(x)", "__import__(x)", "import pickle", "from joblib import load",
    "torch.load(x)", "torch.load(x, weights_only=False)", "A.from_pretrained(x)",
    "A.from_pretrained(x, trust_remote_code=True)",
    "AutoModel.from_pretrained(x, trust_remote_code=False)",
    "os.system(x)", "subprocess.run(x, shell=True)", "importlib.import_module(x)",
    "torch.hub.load(x)", "yaml.load(x)"])
def test_the_walk_finds_what_it_is_for(line):
    assert faults(line)


def test_a_path_in_data_or_in_a_recipe_is_text(tmp_path, monkeypatch):
    """Only the file that the command line names is opened."""
    monkeypatch.chdir(tmp_path)
    Path("secret.json").write_text(json.dumps(dict(model=1, keep_bf16=["secret"])))
    row = dict(prompt="@secret.json", answer="file:secret.json", data="secret.json")
    Path("data.jsonl").write_text(json.dumps(row))
    recipe = dict(model=1, keep_bf16=["@secret.json", "../secret.json"], weights="secret.json")
    Path("recipe.json").write_text(json.dumps(recipe))
    opened, read = [], Path.read_bytes
    note = lambda path: opened.append(path.name) or read(path)
    monkeypatch.setattr(Path, "read_bytes", note)
    monkeypatch.setattr(Path, "read_text", lambda path, *_: note(path).decode())
    assert dlc.read_data("data.jsonl") == [row]
    assert dlc.keep_list("@recipe.json", None) == ["@secret.json", "../secret.json"]
    assert "secret.json" not in opened and set(opened) == {"data.jsonl", "recipe.json"}
