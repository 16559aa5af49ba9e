"""What is published: complete metadata, a citation of the same version, and archives that hold all their files."""

import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it along

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]


def files_under(folder: Path) -> set[str]:
    """Paths relative to the root, without compiled files."""
    caches = {"__pycache__", ".ruff_cache"}
    found = (path for path in folder.rglob("*") if path.is_file() and not caches & set(path.parts))
    return {path.relative_to(ROOT).as_posix() for path in found}


@pytest.mark.parametrize("field", ["authors", "classifiers", "description", "keywords", "license", "readme", "urls"])
def test_metadata_has_every_field_that_an_index_shows(field):
    assert PROJECT[field]


def test_metadata_names_the_supported_pythons_and_the_types():
    versions = [line.rsplit(" ", 1)[1] for line in PROJECT["classifiers"] if "Python :: 3." in line]
    assert versions == PYTHONS and PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert "Typing :: Typed" in PROJECT["classifiers"]


def test_build_needs_hatchling_alone():
    """Torch in the build environment would be gigabytes for every installation from source."""
    (needed,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert needed.startswith("hatchling")


def test_citation_has_the_version_of_the_package_and_prefers_the_paper():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, of the extra dev")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert citation["title"] == PROJECT["name"] and citation["license"] == PROJECT["license"]
    assert citation["version"] == PROJECT["version"]
    assert citation["keywords"] == PROJECT["keywords"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in PROJECT["authors"]]
    paper = citation["preferred-citation"]
    assert [author["family-names"] for author in paper["authors"]] == ["Zhang", "Zhong", "Xie", "Pu"]
    assert paper["year"] == 2022 and paper["url"] == PROJECT["urls"]["Paper"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source archive, built by hatchling in this environment: a second or two."""
    pytest.importorskip("hatchling", reason="needs hatchling, of the extra dev")
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t", "sdist", "-t", "wheel"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return folder


def test_wheel_holds_every_file_of_the_package_and_nothing_else(built):
    version = PROJECT["version"]
    with zipfile.ZipFile(built / f"krnet-{version}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = message_from_bytes(wheel.read(f"krnet-{version}.dist-info/METADATA"))
    package = {name.removeprefix("src/") for name in files_under(ROOT / "src")}
    kept = {*files_under(ROOT / "recipes"), "results/paper.csv"}  # where krnet.io.kept finds them
    package |= {f"krnet/kept/{name}" for name in kept}
    assert {name for name in names if not name.startswith(f"krnet-{version}.dist-info/")} == package
    assert {"krnet/nn/cuda/batchnorm.cu", "krnet/nn/cuda/kernels.cu"} <= names
    assert f"krnet-{version}.dist-info/licenses/LICENSE" in names
    assert metadata["Name"] == "krnet" and metadata["Version"] == version
    needed = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert len(needed) == len(PROJECT["dependencies"])


def test_source_archive_holds_what_its_tests_need_and_stays_small(built):
    archive = built / f"krnet-{PROJECT['version']}.tar.gz"
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    wanted = {"README.md", "LICENSE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt"}
    assert wanted | {"pyproject.toml", "PKG-INFO"} <= names
    assert files_under(ROOT / "tests" / "golden") <= names
    assert {*files_under(ROOT / "recipes"), "results/paper.csv"} <= names
    for folder in ("src", "tests", "tools", "benchmarks"):
        assert {name for name in files_under(ROOT / folder) if name.endswith((".py", ".sh", ".cu", ".h"))} <= names
    assert archive.stat().st_size < 8e6
