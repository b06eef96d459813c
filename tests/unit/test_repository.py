"""The repository keeps its own rules: rooms, lengths, no binaries, no private hosts or paths, no loose ends.

Words that must not stand in any file are put together here from parts, so that this file passes too.
"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import click
import pytest

import docs.generate
from smq.coordinator.cli.root import cli

ROOT = Path(__file__).resolve().parents[2]
GENERATED = (
    "smq/clients/pb/",
    "locks/",
    "LICENSE",
    "docs/reference/commands.md",
    "docs/reference/errors.md",
    "docs/reference/evidence.md",
    "docs/groups.md",
    "docs/reference/grpc.md",
    "docs/kafka.md",
    "docs/reference/metrics.md",
    "docs/reference/settings.md",
    "smq/coordinator/kafka/messages/",
)
ROOMS = (
    "smq/coordinator",
    "smq/raft_state",
    "smq/replication",
    "smq/clients",
    "smq/spark_connector",
    "pyspark_smq",
    "chaos_tests",
    "deploy",
    "docs",
    "benchmarks",
    "tests/unit",
    "tests/sim",
    "tests/cluster",
    "tests/spark",
)
FILES = ("pyproject.toml", "locks/dev.txt", "Makefile", ".ci/run", "README.md", "ARCHITECTURE.md", "LICENSE")
CITING = (
    "smq/",
    "chaos_tests/",
    "tests/",
    "benchmarks/",
    "examples/",
    "docs/",
    "deploy/",
    *(f for f in FILES if "." in f),
)
DECISION_WORDS_MAX = 400
TOUR_WORDS_MAX = 6_000
DOCS_WORDS_MAX = 70_000
CARD = (
    "coordinator",
    "raft_state",
    "replication",
    "clients",
    "spark_connector",
    "chaos_tests",
    "deploy",
    "pyproject.toml",
)


@cache
def _tracked() -> list[Path]:
    """Every committed file that is still there, or every file if this is not a git checkout."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
        names = [name for name in listed.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        kept = (".ci", ".gitignore")
        names = [
            path.relative_to(ROOT).as_posix()
            for path in ROOT.rglob("*")
            if not any(
                part == "__pycache__" or (part.startswith(".") and part not in kept)
                for part in path.relative_to(ROOT).parts
            )
        ]
    return [ROOT / name for name in sorted(names) if (ROOT / name).is_file()]


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _is_generated(path: Path) -> bool:
    return _name(path).startswith(GENERATED)


def _sources() -> list[Path]:
    return [path for path in _tracked() if path.suffix == ".py" and not _is_generated(path)]


@cache
def _lines() -> list[tuple[str, str]]:
    """(place, line) of every line that a person wrote."""
    return [
        (f"{_name(path)}:{number}", line)
        for path in _tracked()
        if not _is_generated(path) and path.suffix != ".png"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    ]


def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("room", ROOMS)
def test_room_of_the_card_exists_and_is_not_empty(room: str) -> None:
    assert any((ROOT / room).iterdir())


@pytest.mark.parametrize("name", FILES)
def test_file_of_the_card_exists(name: str) -> None:
    assert (ROOT / name).stat().st_size > 0
    assert ROOT / name in _tracked(), "the rules below are kept by the files that this lists"


def test_readme_table_names_every_room_of_the_card() -> None:
    rows = re.findall(r"^\| `([^`]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tuple(row.split("/")[-1] for row in rows[: len(CARD)]) == CARD
    assert all((ROOT / row).exists() for row in rows[: len(CARD)])


def test_no_binary_file_is_committed_but_the_pictures_of_the_pages() -> None:
    def is_binary(data: bytes) -> bool:
        try:
            return "\0" in data.decode("utf-8")
        except UnicodeDecodeError:
            return True

    found = {path for path in _tracked() if is_binary(path.read_bytes())}
    assert found == {path for path in _tracked() if path.suffix == ".png"}
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+\.png)\)", page.read_text())
    }
    assert found == shown


def test_no_registry_host_is_named() -> None:
    names = "|".join(("py" + "pi", "python" + "hosted", "npm" + "js", "docker", "quay", "ghcr", "crates", "maven"))
    host = re.compile(rf"\b({names})\.(org|com|io)\b|--(extra-)?index" + r"-url[ =]\S")
    assert [place for place, line in _lines() if host.search(line)] == []
    assert [lock.name for lock in (ROOT / "locks").iterdir() if host.search(lock.read_text())] == []


def test_no_advice_installs_another_projects_smq() -> None:
    pattern = re.compile(r"pip install ['\"]?sm" + r"q\b|\bsm" + r"q\[")
    assert [place for place, line in _lines() if pattern.search(line)] == []


def test_no_path_of_a_private_machine_is_named() -> None:
    paths = re.compile(r"(?<![\w.])/(work|root|home/\w+|Users)/")
    assert [place for place, line in _lines() if paths.search(line)] == []


def test_no_loose_end_is_left() -> None:
    loose = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")
    assert [place for place, line in _lines() if loose.search(line)] == []


def test_every_module_says_what_it_is() -> None:
    packages = ("smq/", "chaos_tests/", "pyspark_smq/", "benchmarks/")
    silent = [
        _name(path)
        for path in _sources()
        if _name(path).startswith(packages) and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert silent == []


def test_every_lint_ignore_carries_its_reason() -> None:
    ignore = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:\s*ignore|pragma:\s*no cover)(?P<rest>.*)$")
    bare = []
    for place, line in _lines():
        match = ignore.search(line)
        if not place.split(":")[0].endswith(".py") or not match or "re.compile" in line:
            continue
        reason = re.sub(r"^[:\s]*(\[[\w\-, ]+\]|[A-Z]+\d+(,\s*[A-Z]+\d+)*)?[\s\-:#(]*", "", match["rest"])
        if len(reason) < len("a reason"):
            bare.append(place)
    assert bare == []


def _pins(lock: Path) -> dict[str, tuple[str, str]]:
    """Name -> (version and marker, hashes)."""
    pin = r"^([a-z0-9.\-]+)(==[^\n]*?)(?: \\)?((?:\n    --hash=sha256:[0-9a-f]{64}[^\n]*)*)$"
    return {name: (version, hashes) for name, version, hashes in re.findall(pin, lock.read_text(), re.MULTILINE)}


def test_locks_pin_every_package_by_hash_and_name_no_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    whole = _pins(ROOT / "locks/dev.txt")
    for lock in (ROOT / "locks").glob("*.txt"):
        assert "://" not in lock.read_text()
        if lock.stem not in extras:
            continue
        pins = _pins(lock)
        assert [name for name, (_, hashes) in pins.items() if not hashes] == []
        wanted = {
            re.split(r"[^A-Za-z0-9.\-_]", line)[0].lower() for line in project["dependencies"] + extras[lock.stem]
        }
        assert {name.replace("_", "-") for name in wanted} - set(pins) <= {project["name"]}
        assert {name: whole[name][0].split()[0] for name in pins} == {n: v.split()[0] for n, (v, _) in pins.items()}


def test_every_make_target_that_a_page_names_exists() -> None:
    pages = [path.read_text() for path in _tracked() if path.suffix == ".md"]
    named = {word for page in pages for word in re.findall(r"(?:^ {4}|^|`)make ([a-z-]+)", page, re.MULTILINE)}
    assert named - _targets() == set()
    assert {"install", "setup", "demo", "quick", "test", "test-full", "check", "sim", "bench", "proto"} <= _targets()


def test_every_page_that_is_cited_is_in_the_repository() -> None:
    """A page is cited by its path from the root, from the citing file's folder, from docs/, or from its reference."""
    cited = [(place, page) for place, line in _lines() for page in re.findall(r"[\w./-]+\.md\b", line)]
    cited = [(place, page) for place, page in cited if place.startswith(CITING)]

    def bases(place: str) -> tuple[Path, ...]:
        return ROOT, (ROOT / place).parent, ROOT / "docs", ROOT / "docs/reference"

    assert {place.split("/")[0] for place, _ in cited} >= {"smq", "tests", "chaos_tests", "docs"}
    missing = [
        f"{place} {page}"
        for place, path in cited
        for page in [path.removeprefix("/opt/smq/")]  # where the service is installed
        if not any((base / page).is_file() for base in bases(place))
    ]
    assert missing == []
    unpublished = re.compile(r"\bDES" + r"IGN\b|\bnotes(?:/|: (?!dict\b))|\b[Ii]ssue (#?\d+|asks)")
    assert [place for place, line in _lines() if place.startswith(CITING) and unpublished.search(line)] == []


def test_every_module_that_a_page_names_exists() -> None:
    names = tuple(f"/{_name(path)}" for path in _tracked())
    named = {
        (_name(path), module)
        for path in _tracked()
        if path.suffix == ".md" and not _is_generated(path)
        for module in re.findall(r"`([\w./-]+\.py)`", path.read_text(encoding="utf-8"))
    }
    assert named
    assert {(page, module) for page, module in named if not any(name.endswith(f"/{module}") for name in names)} == set()


def test_every_rule_finding_and_promise_that_is_cited_is_on_the_page_of_rules() -> None:
    page = (ROOT / "docs/rules.md").read_text()
    rules = set(re.findall(r"^(\d+)\. \*\*", page, re.MULTILINE))
    findings = set(re.findall(r"^\| (\d+) \|", page, re.MULTILINE))
    promises = set(re.findall(r"^(\d+)\. \w", page.partition("\n## Promises\n")[2], re.MULTILINE))
    assert all((rules, findings, promises))
    unknown = []
    for place, line in _lines():
        for kind, numbers in re.findall(r"\b(rules?|findings?) (\d+(?:(?:, | and | to )\d+)*)", line, re.IGNORECASE):
            known = rules if kind.lower().startswith("rule") else findings
            unknown += [f"{place} {kind} {number}" for number in re.findall(r"\d+", numbers) if number not in known]
        unknown += [f"{place} P{number}" for number in re.findall(r"\(P(\d)\b", line) if number not in promises]
    assert unknown == []


def test_every_decision_that_is_cited_exists_and_is_in_the_index() -> None:
    folder = ROOT / "docs/decisions"
    cited = [(place, name) for place, line in _lines() for name in re.findall(r"docs/decisions/([\w-]+\.md)", line)]
    assert {place.split("/")[0] for place, _ in cited} >= {"smq", "chaos_tests", "tests"}
    assert [(place, name) for place, name in cited if not (folder / name).is_file()] == []
    pages = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md") if path.name != "README.md"}
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(pages)
    assert {name: words for name, text in pages.items() if (words := len(text.split())) > DECISION_WORDS_MAX} == {}


def test_the_tour_can_be_read_in_half_an_hour() -> None:
    assert len((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").split()) <= TOUR_WORDS_MAX


def test_all_pages_of_docs_are_in_its_index_and_few_enough_to_be_read() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    linked = {(ROOT / "docs" / link).resolve() for link in re.findall(r"\]\(([^)#:]+\.md)\)", index)}
    pages = set((ROOT / "docs").rglob("*.md"))
    assert pages - linked - {ROOT / "docs/README.md", *(ROOT / "docs/decisions").glob("*.md")} == set()
    assert ROOT / "docs/decisions/README.md" in linked
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= DOCS_WORDS_MAX


def test_every_command_that_code_or_a_page_names_exists() -> None:
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    unknown = []
    for place, line in _lines():
        for name, sub in re.findall(r"`smq ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", line):
            command = commands.get(name)
            if command is None or (
                sub and isinstance(command, click.Group) and sub not in command.list_commands(context)
            ):
                unknown.append(f"{place} smq {name} {sub}")
    assert unknown == []


def test_gate_runs_check_and_test() -> None:
    gate = (ROOT / ".ci/run").read_text()
    assert (ROOT / ".ci/run").stat().st_mode & 0o111
    assert gate.index("make check") < gate.index("make test")
    assert "set -e" in gate


def test_every_generated_page_is_known_as_one() -> None:
    assert {str(docs.generate.page_of(page).relative_to(ROOT)) for page in docs.generate.names()} == {
        f for f in GENERATED if re.match(r"docs/.*md$", f)
    }


@pytest.mark.parametrize("page", docs.generate.names())
def test_generated_page_is_what_the_code_gives(page: str) -> None:
    code = f"from docs.generate import rendered; print(rendered({page!r}), end='')"
    rendered = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    path = docs.generate.page_of(page)
    assert path.read_text() == rendered, f"run `make docs` and commit {path}"


def test_clients_import_carries_no_server_and_no_spark() -> None:
    code = (
        "import sys, importlib, pkgutil, smq.clients\n"
        "for m in pkgutil.iter_modules(smq.clients.__path__): importlib.import_module('smq.clients.' + m.name)\n"
        "print(sorted({'lmdb', 'pysyncobj', 'pyspark', 'uvloop', 'click', 'structlog'} & set(sys.modules)))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert loaded.strip() == "[]"


def test_every_import_contract_breaks_on_an_import_against_it(tmp_path: Path) -> None:
    planted = {
        "smq/clients/retry.py": "import smq.testing.virtual.clock",
        "smq/records.py": "import chaos_tests",
        "smq/replication/ports.py": "import smq.replication.node, pysyncobj",
        "smq/coordinator/config/node_toml.py": "import smq.coordinator.cli.root",
        "smq/raft_state/ids.py": "import time",
        "smq/clients/__init__.py": "import smq.raft_state.commands",
        "smq/spark_connector/source.py": "import smq.replication.ports",
    }
    for package in ("smq", "chaos_tests", "pyspark_smq", "benchmarks"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for module, line in planted.items():
        with (tmp_path / module).open("a") as file:
            file.write(f"\n{line}\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, env={"COLUMNS": "300"})
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    broken = set(re.findall(r"^(.*) BROKEN\b", result.stdout, re.MULTILINE))
    assert broken == {contract["name"] for contract in contracts}
