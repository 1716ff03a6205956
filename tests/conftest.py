"""Setup for all tests: the hypothesis profile, golden files, and the skipping of GPU tests."""

import contextlib
import difflib
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from outcore import worker

CASES = Path(__file__).parent / "cases"
GPU = Path(__file__).parent / "gpu"
OTHERS_SET = (
    "PYTEST_",
    "KINETO_",
    "TORCHINDUCTOR_",
    "_TORCHINDUCTOR_",
    "TRITON_",
    "KMP_",
    "CUBLAS_",
)
"""How the names of environment variables begin that pytest, torch, scikit-learn and MONAI set."""

worker.IDLE_SECONDS = 120.0  # another planning process takes three seconds of a core

with contextlib.suppress(ImportError):  # tests/gpu does not need it
    import hypothesis

    hypothesis.settings.register_profile(
        "outcore",
        deadline=None,  # a test on a busy two-core machine may be slow
        derandomize=bool({"CI", "OUTCORE_SAME_DRAWS"} & os.environ.keys()),
        print_blob=True,
    )
    hypothesis.settings.load_profile("outcore")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):  # tests/gpu runs with pytest alone
        parser.addini("timeout", "seconds that a test may take, which nobody counts here")
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="rewrite the files of tests/cases from what the tests produce",
    )


def pytest_configure(config: pytest.Config) -> None:
    if not config.pluginmanager.hasplugin("xdist"):
        config.addinivalue_line("markers", "xdist_group(name): tests that share a process")


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, Any, Any]:
    """Keep the environment equal for all tests: the planning process serves only the one it has.

    pytest sets this variable just before, once the wrappers of `pytest_runtest_call` have begun.
    """
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests in tests/gpu, keep them in one process, and skip them without a device."""
    gpu_items = [item for item in items if GPU in item.path.parents]
    for item in gpu_items:
        item.add_marker("gpu")
        item.add_marker(pytest.mark.xdist_group("gpu"))  # tests measure the device's memory
    if gpu_items and not _cuda_is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; this machine has none"))


def _cuda_is_available() -> bool:
    import torch  # noqa: PLC0415 - only if GPU tests were collected: tests/pure runs without torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def _environment_stays() -> Iterator[None]:
    """Fail a test that leaves a changed environment to those that follow in its process."""
    before = dict(os.environ)
    yield
    left = {name for name, _ in before.items() ^ os.environ.items()}
    names = sorted(name for name in left if not name.startswith(OTHERS_SET))
    if names:
        os.environ.clear()
        os.environ.update(before)
        pytest.fail(f"the test leaves the environment changed: {', '.join(names)}")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function that compares `text` with tests/cases/<name>.txt.

    With --update-golden it writes the file instead.
    """

    def check(text: str, name: str) -> None:
        path = CASES / f"{name}.txt"
        produced = text.rstrip("\n") + "\n"
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(produced, encoding="utf-8")
        elif not path.exists():
            pytest.fail(f"no golden file {path}: make it with --update-golden", pytrace=False)
        elif (expected := path.read_text(encoding="utf-8")) != produced:
            pytest.fail(_difference(expected, produced, path), pytrace=False)

    return check


@pytest.fixture
def outcore(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A function that runs a command and returns its exit code, stdout and stderr."""
    from typer.testing import CliRunner  # noqa: PLC0415 - most of tests/gpu does not need it

    from outcore.cli import app  # noqa: PLC0415 - as above

    for variable in ("KINETO_LOG_LEVEL", "TORCH_CPP_LOG_LEVEL"):
        monkeypatch.setenv(variable, "")  # the command sets them: monkeypatch restores them
        monkeypatch.delenv(variable)
    monkeypatch.setenv("COLUMNS", "150")

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(app, arguments, prog_name="outcore")

    return run


def _difference(expected: str, produced: str, path: Path) -> str:
    lines = difflib.unified_diff(
        expected.splitlines(), produced.splitlines(), str(path), "produced", lineterm=""
    )
    return "\n".join(["text differs from its golden file (--update-golden rewrites):", *lines])
