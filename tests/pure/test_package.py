"""The package as a whole: which modules import torch, reasons for ignored rules, dependencies."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outcore"
MAY_IMPORT_TORCH = {
    "runtime",
    "api",
    "aten",
    "preflight",
    "capture",
    "optimizers",
    "wrapping",
    "execute",
    "integrations",
    "measure",
    "networks",
    "torch_backend",
}

IMPORT_EACH = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if "torch" in sys.modules:
        sys.exit(f"importing {name} imported torch")
"""


def run(code, *arguments):
    command = [sys.executable, "-c", code, *arguments]
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def torch_free_modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] not in MAY_IMPORT_TORCH:
            yield ".".join(("outcore", *parts)).removesuffix(".__init__")


def test_the_planning_half_and_the_command_line_import_without_torch():
    modules = list(torch_free_modules())
    assert "outcore.errors" in modules
    finished = run(IMPORT_EACH, *modules)
    assert finished.returncode == 0, finished.stderr


def sources():
    for folder in ("src", "benchmarks", "examples", "tests"):
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_every_ignored_rule_says_why():
    bare = re.compile(r"# (noqa(: [A-Z0-9, ]+)?|type: ignore(\[[\w, -]+\])?)\s*$")
    offenders = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sources()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert not offenders, "write the reason after the code:\n" + "\n".join(offenders)


def test_every_ignored_lint_rule_in_the_settings_says_why():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lint = tomllib.loads(text)["tool"]["ruff"]["lint"]
    ignored = {
        *lint["ignore"],
        *(rule for rules in lint["per-file-ignores"].values() for rule in rules),
    }
    reasoned = set(re.findall(r'^  "([A-Z0-9]+)", +# \S+', text, flags=re.MULTILINE))
    assert ignored == reasoned


OTHERWISE_NAMED = {"PIL": "pillow", "sklearn": "scikit-learn"}
"""Packages whose import name differs from the name that pip installs."""


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_every_package_that_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    users = (e for e in project["optional-dependencies"].items() if e[0] not in ("dev", "test"))
    wanted = [*project["dependencies"], *(each for _, extra in users for each in extra)]
    declared = {re.split(r"[^\w-]", each)[0].lower() for each in wanted}
    found = {name for path in PACKAGE.rglob("*.py") for name in imported(path)}
    others = found - set(sys.stdlib_module_names) - {"outcore"}
    assert {OTHERWISE_NAMED.get(name, name).lower() for name in others} <= declared
