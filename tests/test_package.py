"""Holds what an installation must contain: one version everywhere, the native module, its typed stub and the command."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from importlib.metadata import entry_points, requires, version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import moetriage
from moetriage import _native


def test_one_version_everywhere() -> None:
    assert moetriage.__version__ == version("moetriage") == _native.version


def test_the_native_module_is_installed_with_its_stub() -> None:
    spec = find_spec("moetriage._native")
    assert spec is not None
    assert spec.origin is not None
    stub = Path(spec.origin).parent / "_native.pyi"
    assert "version: str" in stub.read_text()
    assert files("moetriage").joinpath("py.typed").is_file()


def test_the_command_is_installed_and_starts() -> None:
    (entry,) = entry_points(group="console_scripts", name="moetriage")
    assert entry.value == "moetriage.cli.main:main"
    script = Path(sysconfig.get_path("scripts")) / "moetriage"
    result = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == f"moetriage {moetriage.__version__}"


def test_llama_cpp_is_pinned_to_the_build_whose_layout_was_checked() -> None:
    declared = [line for line in requires("moetriage") or [] if line.startswith("llama-cpp-python")]
    assert declared == [f"llama-cpp-python=={version('llama-cpp-python')}"]


def test_torch_is_not_needed_to_run() -> None:
    code = "import sys; sys.modules['torch'] = None; import moetriage.cli.main"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
