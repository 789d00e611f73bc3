"""A release of SGLang in a process: which one, what stands in for what it lacks, what casts do."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from textwrap import dedent
from types import ModuleType

import pytest

from systems import CannotLoad
from systems.sglang import loader, stubs, wheels
from systems.sglang.releases import RELEASES

MODULES = (
    "mem_cache.memory_pool",
    "mem_cache.allocator",
    "mem_cache.radix_cache",
    "mem_cache.unified_radix_cache",
    "layers.attention.dsa.kpool_plan",
    "layers.attention.dsa.kpool_fp8_index",
    "layers.attention.dsa.dsa_indexer_kpool",
    "layers.attention.dsa_backend",
    "managers.schedule_batch",
    "managers.hisparse_coordinator",
    "mem_cache.allocator.hisparse",
    "mem_cache.pool_host.hisparse",
    "disaggregation.nixl.conn",
    "disaggregation.decode",
)
"""What the adapters drive."""


def python(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", dedent(script), *map(str, arguments)],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def checkout(root: Path, version: str | None = "0.5.23") -> Path:
    """A folder that holds something like SGLang."""
    package = root / "sglang"
    (package / "srt" / "configs").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it imports everything')\n")
    (package / "srt" / "configs" / "__init__.py").write_text("from . import all_models\n")
    (package / "srt" / "configs" / "one_model.py").write_text("SIZE = 3\n")
    (package / "srt" / "cache.py").write_text(
        "import zmq.auth\nfrom sglang.srt.configs import one_model, OtherModel\n"
        "from sglang.srt.utils.hf_transformers.common import read_model\n"
        "def kind(model: OtherModel | None): return isinstance(model, OtherModel)\n"
    )
    if version:
        (package / "_version.py").write_text(
            f"__version__: str\n__version__ = version = {version!r}\n"
        )
    return root


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.5.21", "0.5.21"),
        ("0.5.23.post1", "0.5.23"),
        ("0.5.24.dev7+gabc", "0.5.23"),
        ("0.5.23.dev1", "0.5.22"),
        ("1.0", "0.5.23"),
    ],
)
def test_a_checkout_has_the_row_of_the_release_that_it_is_based_on(tmp_path, version, row):
    root = checkout(tmp_path, version)
    assert loader.version_of(root) == version
    assert loader._row(version, root) is RELEASES[row]


@pytest.mark.parametrize("version", ["0.5.19", "0.5.20.dev3", "no version"])
def test_what_the_table_does_not_know_is_refused(tmp_path, version):
    with pytest.raises(CannotLoad, match=r"take one of 0\.5\.20, .* or add a row to"):
        loader.load(checkout(tmp_path, version))


def test_a_folder_without_sglang_is_refused(tmp_path):
    with pytest.raises(CannotLoad, match="holds no SGLang: give a checkout, or"):
        loader.load(tmp_path)


def test_a_checkout_that_was_never_built_is_known_by_its_tags(tmp_path):
    root = checkout(tmp_path / "repo", None)
    with pytest.raises(CannotLoad, match="does not tell its version: give a git checkout with"):
        loader.version_of(root)
    who = ("-c", "user.name=t", "-c", "user.email=t@t.invalid")
    for command in (
        ["init", "--quiet"],
        ["add", "--all"],
        [*who, "commit", "--quiet", "--message", "One"],
        [*who, "tag", "v0.5.22"],
        [*who, "commit", "--quiet", "--allow-empty", "--message", "Two"],
    ):
        subprocess.run(["git", "-C", str(root), *command], check=True)
    assert loader.version_of(root) == "0.5.22"


def test_one_release_a_process_without_what_it_depends_on(tmp_path):
    said = python(
        """
        import sys
        from pathlib import Path
        from systems import CannotLoad
        from systems.sglang.loader import load
        one, two = map(Path, sys.argv[1:])
        release = load(one)
        assert load(one) is release
        from sglang.srt import cache
        assert cache.one_model.SIZE == 3
        assert cache.kind(4) is False
        for use in (lambda: cache.zmq.auth.start(), lambda: cache.read_model("x")):
            try:
                use()
            except RuntimeError as refusal:
                print(refusal)
        try:
            load(two)
        except CannotLoad as refusal:
            print(refusal)
        """,
        checkout(tmp_path / "one"),
        checkout(tmp_path / "two"),
    ).splitlines()
    assert said[0].startswith("SGLang used zmq.auth.start, for which there is only a stand-in")
    assert said[1].startswith("SGLang used sglang.srt.utils.hf_transformers.common.read_model")
    assert said[2].endswith(
        "can hold only one: load {} in a process of its own.".format(tmp_path / "two")
    )


def test_casts_under_the_interpreter_are_torchs():
    said = python(
        """
        import os
        os.environ["TRITON_INTERPRET"] = "1"
        from systems.sglang import interpreter
        before = interpreter.mismatches()
        interpreter.prepare()
        print(before["float32 to bf16"] > 1000, any(interpreter.mismatches().values()))
        """
    )
    assert said == "True False", "Triton's own casts are wrong, and then all are right"


def test_kernels_for_a_gpu_are_refused_where_there_is_none():
    said = python(
        """
        import triton
        from systems import CannotLoad
        from systems.sglang import interpreter
        try:
            interpreter.prepare()
        except CannotLoad as refusal:
            print(refusal)
        """
    )
    assert said.endswith("set that variable before this process starts.")


class Derived(stubs.StandIn("pydantic").BaseModel, extra="allow"):  # type: ignore[misc]
    """As SGLang derives classes from those of packages that are not there."""

    size: int = 3


@pytest.mark.parametrize(
    "use",
    [
        lambda absent: absent.Field(default=3),
        lambda absent: absent.deep.er.call(),
        lambda absent: Derived(size=4),
        lambda absent: absent.LIMIT + 1,
        lambda absent: 1 + absent.LIMIT,
        lambda absent: absent.LIMIT < 3,
        lambda absent: len(absent.NAMES),
        lambda absent: list(absent.NAMES),
        lambda absent: bool(absent.FLAG),
        lambda absent: absent.TABLE.__setitem__("x", 3),
    ],
)
def test_a_stand_in_fails_when_it_is_used(use):
    sentence = r"SGLang used pydantic\.\w+.*: keep to .*install 'pydantic'"
    with pytest.raises(stubs.Absent, match=sentence):
        use(stubs.StandIn("pydantic"))


def test_a_stand_in_can_be_named():
    absent = stubs.StandIn("zmq")
    assert absent.Socket is absent.Socket
    assert absent.Socket | None
    assert absent.Array[int] is absent.Array
    assert not isinstance(3, absent.Socket)
    assert not issubclass(int, absent.Socket)
    with pytest.raises(AttributeError):
        absent.__all__  # noqa: B018


def test_a_package_that_is_in_use_stays_what_it_is(monkeypatch):
    module = ModuleType("orjson")
    monkeypatch.setitem(sys.modules, "orjson", module)
    # one that was made here, as transfer_wire makes zmq
    assert stubs.ALWAYS.find_spec("orjson.later") is not None
    module.__spec__ = ModuleSpec("orjson", None)
    assert stubs.ALWAYS.find_spec("orjson.later") is None


def test_only_what_was_listed_is_stood_in_for(monkeypatch):
    for package in ("transformers", "yaml", "flashinfer"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    assert stubs.ALWAYS.find_spec("transformers.models") is not None
    assert stubs.ALWAYS.find_spec("yaml") is None
    assert stubs.ELSE.find_spec("yaml") is not None
    assert stubs.ELSE.find_spec("flashinfer") is None
    assert stubs.ELSE.find_spec("sglang.srt.utils.hf_transformers.common") is not None
    assert stubs.ELSE.find_spec("sglang.srt.utils.hf_transformers_other") is None


NEEDED = (
    *("torch", "torchgen", "functorch", "triton", "numpy", "msgspec", "packaging"),
    "psutil",
    "typing_extensions",
    *("sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec", "setuptools"),
)
"""What comes with torch and with us."""


@pytest.mark.sglang
@pytest.mark.parametrize("version", RELEASES)
def test_a_release_imports_and_its_stand_ins_are_loud(version, tmp_path):
    """Whether what they stand in for is installed or not, and with nothing else than we need."""
    # torch tries to import others of them
    for package in ("pydantic", "regex", "transformers", "zmq"):
        (tmp_path / f"{package}.py").write_text("raise SystemError('the installed one')")
    said = python(
        """
        import sys
        sys.path.insert(0, sys.argv.pop(1))
        needed = set(sys.argv.pop(1).split())
        from importlib.machinery import PathFinder
        class Few(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                found = super().find_spec(name, path, target)
                top = name.partition(".")[0]
                elsewhere = found is None or "site-packages" not in str(found.origin)
                return found if elsewhere or top in needed else None
        sys.meta_path[sys.meta_path.index(PathFinder)] = Few
        from importlib import import_module
        from pathlib import Path
        from systems.sglang.loader import load
        from systems.sglang.stubs import Absent
        folder, *modules = sys.argv[1:]
        print(load(Path(folder)).version)
        for module in modules:
            import_module(f"sglang.srt.{module}")
        from sglang.srt.managers import schedule_batch
        assert Path(schedule_batch.__file__).is_relative_to(Path(folder).resolve())
        import transformers
        try:
            transformers.AutoConfig.from_pretrained("x")
        except Absent as refusal:
            print(refusal)
        """,
        tmp_path,
        " ".join(NEEDED),
        wheels.unpacked(version),
        *MODULES,
    ).splitlines()
    assert said[0] == version
    assert said[-1].startswith("SGLang used transformers.AutoConfig.from_pretrained")
