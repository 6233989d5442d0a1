"""What a user installs: a wheel and an sdist hold all three packages, whatever folder they are in.

`kernels/` and `parcae/` stand beside `minifer/` in the tree and below it once installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HOMES = {"minifer": "minifer", "kernels": "minifer/kernels", "parcae": "minifer/parcae"}
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(
    not (ROOT / ".git").exists() or shutil.which("git") is None, reason="needs the git checkout"
)


def tracked() -> list[Path]:
    """The tracked files that are there, relative to the root."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    names = [Path(os.fsdecode(name)) for name in listing.stdout.split(b"\0") if name]
    return [name for name in names if (ROOT / name).is_file()]


def installed_name(file: Path) -> str:
    """minifer/llm.py → minifer/llm.py, kernels/norm.py → minifer/kernels/norm.py."""
    return "/".join([HOMES[file.parts[0]], *file.parts[1:]])


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, out: Path) -> Path:
    run("-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q",
        "--wheel-dir", str(out), str(source), cwd=out.parent)  # fmt: skip
    (wheel,) = out.glob("*.whl")
    return wheel


def names_in(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, a clean copy of the tree, and `wheel`, what is built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    for name in tracked():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
    build_wheel(folder / "source", folder / "wheel")
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = (built / "wheel").glob("*.whl")
    return wheel


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    folders = {
        installed_name(file.parent).replace("/", ".")
        for file in tracked()
        if file.parts[0] in HOMES and file.suffix == ".py" and "assets" not in file.parts
    }
    assert folders == set(SETTINGS["tool"]["setuptools"]["packages"])


def test_the_wheel_holds_every_tracked_file_of_the_packages(wheel: Path) -> None:
    ours = {installed_name(file) for file in tracked() if file.parts[0] in HOMES}
    packed = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert packed == ours
    assert {"minifer/py.typed", "minifer/kernels/py.typed", "minifer/parcae/py.typed"} <= packed


def test_the_wheel_has_licence_and_command(wheel: Path) -> None:
    (licence,) = (name for name in names_in(wheel) if name.endswith("licenses/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    (entry_points,) = (name for name in names_in(wheel) if name.endswith("entry_points.txt"))
    assert b"minifer = minifer.cli:main" in zipfile.ZipFile(wheel).read(entry_points)


def test_installed_from_the_wheel_all_three_import_from_outside_the_tree(
    wheel: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    run("-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "-q",
        "--target", str(target), str(wheel), cwd=tmp_path)  # fmt: skip
    program = (
        "import minifer, minifer.kernels, minifer.parcae\n"
        "for module in (minifer, minifer.kernels, minifer.parcae): print(module.__file__)\n"
        "print(minifer.__version__)\n"
    )
    *files, version = run("-c", program, cwd=tmp_path, PYTHONPATH=str(target)).splitlines()
    homes = [target / home / "__init__.py" for home in HOMES.values()]
    assert [Path(file) for file in files] == homes
    assert version == SETTINGS["project"]["version"]
    assert not (target / "kernels").exists() and not (target / "parcae").exists()


def test_the_sdist_builds_the_same_wheel(built: Path, wheel: Path) -> None:
    build = "from setuptools import build_meta; print(build_meta.build_sdist('../sdist'))"
    name = run("-c", build, cwd=built / "source").splitlines()[-1]
    with tarfile.open(built / "sdist" / name) as archive:
        archive.extractall(built / "unpacked", filter="data")
    (source,) = (built / "unpacked").iterdir()
    again = build_wheel(source, built / "wheel-of-sdist")
    assert names_in(again) == names_in(wheel)
