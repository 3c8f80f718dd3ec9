"""Encoders by their names on the Hub: from its cache, from an endpoint on this machine, and up to it."""

import base64
import hashlib
import http.server
import json
import pathlib
import shutil
import threading
import typing
import urllib.parse

import numpy as np
import pytest
from testing import COMMIT, fill_cache, finish, start

from maelm_jax import cli, config, embed
from maelm_jax.encoders import hub, opened, recipes
from maelm_jax.finetuning import initial_encoder

constants = pytest.importorskip("huggingface_hub.constants")
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.fixture
def exported(copy_export, tmp_path) -> pathlib.Path:
    """An export with modules of sentence-transformers, and files that no command here reads."""
    folder = copy_export("mpnet", tmp_path / "exported")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true, "pooling_mode_mean_tokens": false}')
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense" / "pytorch_model.bin").write_text("of a module")
    (folder / "tf_model.h5").write_text("for another program")
    return folder


@pytest.fixture
def offline(exported, tmp_path, monkeypatch) -> pathlib.Path:
    """An empty working directory on a machine whose cache has org/name, and which may not use the network."""
    fill_cache(tmp_path / "cache", exported)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("name", ["org/name", "org/name@v1", f"org/name@{COMMIT}"])
def test_a_name_is_read_from_the_cache(offline, exported, name):
    found, folder = opened.find_model(name), opened.find_model(exported)
    assert found.hub_name == f"org/name@{COMMIT}" and found.settings == folder.settings
    assert found.vocabulary.fingerprint == folder.vocabulary.fingerprint
    assert recipes.read_module_files(found.path) == recipes.read_module_files(exported), "links in a folder of the snapshot are followed"
    read, expected = found.read_params(), folder.read_params()
    assert read.keys() == expected.keys() and all(np.array_equal(read[path], expected[path]) for path in read)
    assert not list(offline.iterdir())


@pytest.mark.parametrize(
    "name,step,message",
    [
        ("org/other", None, "HF_HUB_OFFLINE"),
        ("org/name@v2", None, "HF_HUB_OFFLINE"),
        ("org/name", 3, "ORG/NAME@REVISION"),
    ],
)
def test_what_the_cache_does_not_have_is_one_line(offline, name, step, message):
    with pytest.raises(config.ConfigError, match=message) as caught:
        opened.find_model(name, step)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_that_name_wins(offline, exported):
    shutil.copytree(exported, offline / "org" / "name")
    assert opened.find_model("org/name").path == "org/name" and opened.find_model("org/name").hub_name is None
    with pytest.raises(config.ConfigError, match="org/name"):
        opened.find_model("org/nane")


def test_a_fine_tuned_run_records_the_commit(offline):
    loaded = initial_encoder.load("org/name@v1")
    assert (loaded.name, loaded.label) == (f"org/name@{COMMIT}", "name")


def test_a_link_out_of_the_cache_is_refused(offline, tmp_path):
    """As in any stranger's folder: docs/other_peoples_folders.md."""
    (tmp_path / "secret").write_text("{}")
    settings = tmp_path / "cache" / "models--org--name" / "snapshots" / COMMIT / "1_Pooling" / "config.json"
    settings.unlink()
    settings.symlink_to(tmp_path / "secret")
    with pytest.raises(config.ConfigError, match="secret"):
        recipes.read_module_files(opened.find_model("org/name").path)


@pytest.mark.parametrize("name", ["/org/name", "./org/name", "../name", "name", "org/name/more", "gs://org/name", "runs/"])
def test_what_is_no_name_on_the_hub(name):
    assert not hub.is_name(name)


def test_a_hub_that_cannot_be_reached_is_a_failure_of_the_machine(offline, monkeypatch, capsys):
    (offline / "lines.txt").write_text("a line\n")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert cli.status_of(embed.main, ["--workdir=org/other", "--input=lines.txt", "--output=x.npy"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


class Hub(http.server.BaseHTTPRequestHandler):
    """The answers of the Hub about org/name, and of a repository that takes uploads."""

    folder: typing.ClassVar[pathlib.Path]
    asked: typing.ClassVar[list[str]]
    uploaded: typing.ClassVar[dict[str, bytes]]

    def answer(self, content: bytes, status: int = 200, **headers: str):
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content)), "Content-Type": "application/json"} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}

    def do_GET(self):
        path = urllib.parse.urlparse(self.path).path
        self.asked.append(path)
        if path in ("/api/models/org/name/revision/v1", "/api/models/org/name/revision/main"):
            self.answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": []}).encode())
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            entries = [{"type": "file", "path": name, "size": len(text), "oid": self.oid(text)} for name, text in self.files().items()]
            self.answer(json.dumps(entries).encode())
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            text = self.files()[path.split(f"{COMMIT}/")[1]]
            self.answer(text, ETag=f'"{self.oid(text)}"', X_Repo_Commit=COMMIT)
        else:
            self.answer(b'{"error": "not found"}', 404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        if self.path == "/api/repos/create":
            self.answer(json.dumps({"url": f"http://{self.headers['Host']}/org/new"}).encode())
        elif self.path.startswith("/api/models/org/new/preupload/"):
            files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self.answer(json.dumps({"files": files}).encode())
        elif self.path.startswith("/api/models/org/new/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    self.uploaded[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            url = f"http://{self.headers['Host']}/org/new/commit/{COMMIT}"
            self.answer(json.dumps({"success": True, "commitUrl": url, "commitOid": COMMIT}).encode())
        else:
            self.answer(b"{}")

    @staticmethod
    def oid(content: bytes) -> str:
        return hashlib.sha1(content).hexdigest()

    def log_message(self, *_):
        pass


@pytest.fixture
def endpoint(exported, tmp_path, monkeypatch):
    """The handler of a Hub on the loopback, to which processes that are started talk."""
    handler = type("Handler", (Hub,), {"folder": exported, "asked": [], "uploaded": {}})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        values = {
            "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN": "hf_of_nobody",
            "HF_HUB_DISABLE_XET": "1",
        }
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        yield handler
        server.shutdown()


def test_an_encoder_comes_from_an_endpoint_and_goes_up_to_it(endpoint, tmp_path, monkeypatch):
    (tmp_path / "lines.txt").write_text("a line\nanother\n")

    def vectors(workdir, name) -> np.ndarray:
        done = finish(start("embed", f"--workdir={workdir}", f"--input={tmp_path / 'lines.txt'}", f"--output={tmp_path / name}.npy"))
        assert done.status == 0, done.stderr
        return np.load(tmp_path / f"{name}.npy")

    downloaded = vectors("org/name@v1", "downloaded")
    assert np.array_equal(downloaded, vectors(tmp_path / "exported", "exported"))
    assert not any("tf_model" in path for path in endpoint.asked), "files for other programs stay there"
    assert any("2_Dense/pytorch_model.bin" in path for path in endpoint.asked), "the encoder's safetensors do not stand for a module's file"
    pushed = finish(start("export", "--workdir=org/name@v1", f"--output={tmp_path / 'again'}", "--no-verify", "--push_to_hub=org/new"))
    assert pushed.status == 0 and "org/new" in pushed.stdout, pushed.stderr
    written = {str(path.relative_to(tmp_path / "again")): path.read_bytes() for path in (tmp_path / "again").rglob("*") if path.is_file()}
    assert endpoint.uploaded == written and written
    assert f"org/name@{COMMIT}" in (tmp_path / "again" / "README.md").read_text(), "the card says where it comes from"
    absent = finish(start("embed", "--workdir=org/nothing", f"--input={tmp_path / 'lines.txt'}", "--output=x.npy"))
    assert absent.status == 2 and absent.stderr.count("\n") == 1, absent.stderr
