"""Builds the native CPU kernels, one optional library; everything else about the package is in setup.cfg.

Each source but runtime.cpp is compiled once per instruction set (its functions carry the set's name), and the library is
loaded through ctypes: no Python and no torch headers, so one build serves every Python and every torch. Without a working
compiler the package installs all the same, and plain torch computes.

After a change of the sources: `python setup.py build_ext --inplace` (objects that did not change are kept).
"""

import hashlib
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "kernels" / "cpu" / "src"

FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-ffp-contract=fast"]
FLAGS += ["-Wall", "-Wno-maybe-uninitialized", "-Wno-uninitialized", "-g0"]

X86 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
X86_512 = [*X86, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
X86_BF16 = [*X86_512, "-mavx512vnni", "-mavx512bf16"]
INSTRUCTION_SETS = {"baseline": []}
"""Name to compiler flags; kernels/cpu/src/runtime.cpp knows which of them a processor can run."""
if platform.machine() in ("x86_64", "AMD64"):
    INSTRUCTION_SETS |= {"avx2": X86, "avx512": X86_512, "avx512bf16": X86_BF16}
    INSTRUCTION_SETS |= {"amx": [*X86_BF16, "-mamx-tile", "-mamx-bf16"]}

COMPILER_ERRORS = (BaseError, CCompilerError, OSError)


def source_digest() -> str:
    """What kernels/cpu/native.py compares, so that a library never runs beside sources that it was not made of."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class BuildNative(build_ext):
    """Compiles every source for every instruction set; what the compiler does not know or cannot do is left out."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self.compiler.force = True  # it would take a library newer than all objects for one that is made of them
            objects = [self._compile("runtime.cpp", [f'-DSOURCE_DIGEST="{source_digest()}"'])]
            for name, flags in INSTRUCTION_SETS.items():
                objects += self._compile_set(name, flags)
            path = Path(self.get_ext_fullpath(ext.name))
            path.parent.mkdir(parents=True, exist_ok=True)
            self.compiler.link_shared_object(objects, str(path), target_lang="c++")
        except COMPILER_ERRORS as error:
            self.warn(f"no native CPU kernels, plain torch will compute: {error}")

    def _compile_set(self, name: str, flags: list[str]) -> list[str]:
        sources = sorted(path.name for path in SOURCES.glob("*.cpp") if path.name != "runtime.cpp")
        try:
            # A compiler process each: one after another they take minutes.
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                return list(pool.map(lambda source: self._compile(source, [f"-DISA={name}", f"-DISA_{name}", *flags]), sources))
        except COMPILER_ERRORS as error:
            if name == "baseline":
                raise
            self.warn(f"no native CPU kernels for {name}: {error}")
            return []

    def _compile(self, source: str, flags: list[str]) -> str:
        headers = b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.hpp")))
        key = hashlib.sha256(headers + (SOURCES / source).read_bytes() + repr((FLAGS, flags)).encode()).hexdigest()[:16]
        folder = Path(self.build_temp) / key
        made = folder / "object"
        if not made.is_file():
            relative = (SOURCES / source).relative_to(ROOT)
            (path,) = self.compiler.compile([str(relative)], output_dir=str(folder), extra_postargs=[*FLAGS, *flags])
            made.write_text(path)
        return made.read_text()

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            if Path(self.build_lib, self.get_ext_filename(self.get_ext_fullname(ext.name))).is_file():
                super().copy_extensions_to_source()


setup(
    ext_modules=[Extension("kernels.cpu.native_library", sources=[], optional=True, py_limited_api=True)],
    cmdclass={"build_ext": BuildNative},
)
