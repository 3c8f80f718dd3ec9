"""Strictness for every test: 8 CPU devices, no silent promotion of dtype or rank, shapes in signatures checked, warnings are errors."""

import gc
import lzma
import os
import pathlib

# The older emitters of fusions halve the CPU time of compiling a training step. A version of XLA that has none ignores the option.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Tests and the processes they start compile the same programs many times: each is compiled once.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(pathlib.Path(__file__).resolve().parents[1] / ".pytest_cache" / "compiled"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the libraries try each address for a while

from jaxtyping import install_import_hook

install_import_hook(["maelm_jax.model", "maelm_jax.training", "maelm_jax.analysis"], "beartype.beartype")

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402
from emulators import emulated  # noqa: E402
from testing import SHARED, call, english, finish, once, only_devices, start, training  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Tests spend more time in the compiler than in what it compiles.
jax.config.update("jax_disable_most_optimizations", True)

# By default, the collector takes a tenth of the time: it walks through all imported modules again and again.
gc.freeze()
gc.set_threshold(50_000)

# The same examples in each run, however long one of them takes.
hypothesis.settings.register_profile("repeatable", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("repeatable")

CORPUS = SHARED / "corpus" / "valid.txt.xz"


def pytest_addoption(parser):
    parser.addoption("--no-skips", action="store_true", help="a test or file that skips fails, for stages whose requirements are all installed")


def pytest_collection_modifyitems(items):
    """Puts long files first, so that at the end no worker waits for a long test of another."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    return _without_skips((yield), item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return _without_skips((yield), collector.config)


def _without_skips(report, options):
    if options.getoption("no_skips") and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"--no-skips was given, and this skips: {report.longrepr}"
    return report


@pytest.fixture
def one_device(monkeypatch):
    """The package sees one device, as on a machine of its users."""
    only_devices(monkeypatch, 1)


@pytest.fixture(scope="module", params=["gs", "s3"])
def bucket(request):
    """gs://bucket or s3://bucket, of an emulator that every library is pointed at."""
    with emulated(request.param) as place:
        yield place


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of what is kept of buckets on this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def shared_data() -> pathlib.Path:
    """The folder of glue/ and squad/; tests that need it skip where it is absent."""
    if not (SHARED / "glue").is_dir():
        pytest.skip("the labelled data in ../shared/data is not here")
    return SHARED


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Real English: the documents of the corpus' held-out file; where it is absent, the topics of Python's help()."""
    if not CORPUS.exists():
        return english()
    return [text.strip() for text in lzma.decompress(CORPUS.read_bytes()).decode("utf-8").split("\n\n") if text.strip()]


@pytest.fixture(scope="session")
def text(tmp_path_factory) -> pathlib.Path:
    """A folder with a few hundred kilobytes of English that come with Python itself; beside the text stand the rows made of it."""

    def make(folder: pathlib.Path):
        (folder / "topics.txt").write_text("\n\n".join(english()))
        for length in (32, 64):  # here, so that no two workers make the same rows at once
            assert call("prepare", *training(folder, folder / "nowhere", f"--gin.SEQUENCE_LENGTH={length}")).status == 0

    return once(tmp_path_factory, "text", make)


@pytest.fixture(scope="session")
def uninterrupted(text, tmp_path_factory) -> pathlib.Path:
    """The workdir of the small run of tests/testing.py, trained by a process with one device that nothing stopped. Tests only read it."""

    def make(folder: pathlib.Path):
        done = finish(start("train", *training(text, folder / "whole", "--gin.Run.keep_every=5")))
        assert done.status == 0, done.stderr

    return once(tmp_path_factory, "uninterrupted", make) / "whole"
