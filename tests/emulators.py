"""Emulators of Google Cloud Storage and S3 on this machine, for tests."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import time
import typing
import unittest.mock

START_SECONDS = 120.0  # in which an emulator must answer
GCS = """
from http import HTTPStatus

from gcp_storage_emulator import exceptions
from gcp_storage_emulator.handlers import objects

plain = objects.download

def with_generation(request, response, storage, *rest, **more):  # which TensorStore asks for, and this emulator leaves out
    plain(request, response, storage, *rest, **more)
    if response.status != 404:
        file = storage.get_file_obj(request.params["bucket_name"], request.params["object_id"])
        response["x-goog-generation"] = str(file["generation"])

insert = objects.insert

def on_condition(request, response, storage, *rest, **more):  # which this emulator leaves out as well
    if request.query.get("ifGenerationMatch") == ["0"]:
        try:
            name = request.query["name"][0] if "name" in request.query else request.data["meta"]["name"]
            storage.get_file_obj(request.params["bucket_name"], name)
            response.status = HTTPStatus.PRECONDITION_FAILED
            response.json({"error": {"code": 412, "message": "conditionNotMet"}})
            return
        except exceptions.NotFound:
            pass
    insert(request, response, storage, *rest, **more)

objects.download = with_generation
objects.insert = on_condition
from gcp_storage_emulator import server  # its table of handlers takes what stands in the module now

server.create_server("127.0.0.1", PORT, in_memory=True, default_bucket="bucket").run()
"""


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def gcs_emulator(port: int) -> tuple[list[str], dict[str, str]]:
    """Returns the command of an emulator, and the environment that points every library at it."""
    place = f"http://127.0.0.1:{port}"
    environment = {"STORAGE_EMULATOR_HOST": place, "TENSORSTORE_GCS_HTTP_URL": place, "EPATH_USE_TF": "false"}
    return [sys.executable, "-c", GCS.replace("PORT", str(port))], environment


def s3_emulator(port: int) -> tuple[list[str], dict[str, str]]:
    keys = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "EPATH_USE_TF": "false", **keys}
    return [sys.executable, "-m", "moto.server", "-p", str(port)], environment


@contextlib.contextmanager
def emulated(kind: str) -> typing.Iterator[str]:
    """Runs an emulator, at which this process and those that it starts look for buckets.

    Args:
        kind: "gs" or "s3".

    Yields:
        gs://bucket or s3://bucket.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command, environment = {"gs": gcs_emulator, "s3": s3_emulator}[kind](port)
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with unittest.mock.patch.dict(os.environ, environment):
            end = time.monotonic() + START_SECONDS
            while not listens(port):
                if server.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"the emulator of {kind}:// does not start")
                time.sleep(0.1)
            if kind == "s3":
                import s3fs

                s3fs.S3FileSystem().mkdir("bucket")
            yield f"{kind}://bucket"
    finally:
        server.kill()
        server.wait()


def put(place: str, content: bytes):
    """Writes a file into a bucket."""
    import fsspec

    files, path = fsspec.url_to_fs(place, use_listings_cache=False)
    files.pipe_file(path, content)


def put_folder(folder: pathlib.Path, place: str):
    """Copies the files of a folder into a bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            put(f"{place}/{path.relative_to(folder)}", path.read_bytes())
