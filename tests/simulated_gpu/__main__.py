"""Run Python with a simulated GPU: `python -m tests.simulated_gpu -m pytest tests/gpu`.

It needs torch built for CUDA, a C++ compiler, and CUDA's headers. Such a torch brings most of the
headers; `pip install nvidia-cuda-crt` adds the others.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILT = ROOT / "build" / "simulated_gpu"
LIBRARIES = {"libcuda.so.1": ("runtime.cpp", "absent.c"), "libnvidia-ml.so.1": ("nvml.c",)}
"""Name under which torch opens each library -> its sources."""
HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h")


def headers() -> list[Path]:
    """Folders that may hold CUDA's headers. Raises SystemExit if a header is missing."""
    nvidia = importlib.util.find_spec("nvidia")
    folders = [Path(each) for each in (nvidia and nvidia.submodule_search_locations) or ()]
    candidates = [*(found for each in folders for found in each.glob("*/include"))]
    candidates.append(Path("/usr/local/cuda/include"))
    for header in HEADERS:
        if not any((each / header).exists() for each in candidates):
            sys.exit(
                f"no {header} in {', '.join(map(str, candidates))}; try: "
                "pip install nvidia-cuda-crt"
            )
    return candidates


def build() -> list[Path]:
    """The paths of the libraries; a library is compiled again if a source is newer."""
    return [_library(name, [HERE / each for each in LIBRARIES[name]]) for name in LIBRARIES]


def _library(name: str, sources: list[Path]) -> Path:
    library = BUILT / name
    if library.exists() and all(s.stat().st_mtime < library.stat().st_mtime for s in sources):
        return library
    BUILT.mkdir(parents=True, exist_ok=True)
    included = [f"-I{each}" for each in headers()]
    for source in sources:
        language = ["g++", "-std=c++17"] if source.suffix == ".cpp" else ["gcc"]
        warned = ["-O1", "-g", "-fPIC", "-Wall", "-Wextra"]
        made = ["-c", str(source), "-o", str(BUILT / f"{source.stem}.o")]
        subprocess.run([*language, *warned, *included, *made], check=True)
    parts = [str(BUILT / f"{source.stem}.o") for source in sources]
    named = ["-shared", f"-Wl,-soname,{name}", "-o", str(library)]
    subprocess.run(["g++", *named, *parts, "-ldl", "-lpthread"], check=True)
    return library


def main() -> None:
    """Replace this process by Python with the GPU. Raises SystemExit if torch lacks CUDA."""
    torch = importlib.util.find_spec("torch")
    if torch is None or not (Path(str(torch.origin)).parent / "lib" / "libc10_cuda.so").exists():
        sys.exit("torch is not built for CUDA here; try: PyPI's torch for Linux")
    libraries = build()
    paths = [str(HERE / "site"), str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "LD_PRELOAD": os.pathsep.join(map(str, libraries)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    os.execve(sys.executable, [sys.executable, *sys.argv[1:]], env)


if __name__ == "__main__":
    main()
