"""Encoders by their names on the Hugging Face Hub, with huggingface_hub.

Its settings apply: HF_HOME (the cache), HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE. What is downloaded
is a folder of a stranger, and is read as such (docs/other_peoples_folders.md).
"""

import contextlib
import os
import pathlib
import re
import typing

from maelm_jax.config import ConfigError, RunError

NAME = re.compile(r"(?P<repository>(?P<owner>\w[\w.-]*)/[\w.-]+)(?:@(?P<revision>.+))?", re.ASCII)
# Files of an encoder. A pattern matches in every folder. A module of sentence-transformers in a
# folder of its own may have pytorch_model.bin only, even beside an encoder in safetensors.
FILES = ("*.json", "*.txt", "*.model", "*.safetensors", "*/pytorch_model.bin", "vocabulary.sha256")
PYTORCH_FILES = ("pytorch_model*.bin",)  # of an encoder without safetensors
# The same weights for other programs.
IGNORED = ("onnx/*", "openvino/*", "checkpoint-*", "*.fp16.safetensors")


def is_name(path: str) -> bool:
    """Returns whether `path` is a name on the Hub: ORG/NAME or ORG/NAME@REVISION.

    It is none if a folder ORG is on this machine: the user then means a file in this folder.
    """
    match = NAME.fullmatch(path)
    return match is not None and not os.path.exists(match["owner"])


class Download(typing.NamedTuple):
    """A repository in the cache of huggingface_hub."""

    folder: str
    name: str  # ORG/NAME@COMMIT


def download(name: str) -> Download:
    """Downloads the files of an encoder that are not in the cache yet.

    Raises:
        ConfigError: There is no such repository or revision, this user may not read it, or
            HF_HUB_OFFLINE is set and it is not in the cache.
        RunError: The Hub cannot be reached, and it is not in the cache.
    """
    import huggingface_hub as hub

    match = NAME.fullmatch(name)

    def fetch(patterns: tuple[str, ...]) -> pathlib.Path:
        folder = hub.snapshot_download(
            match["repository"],
            revision=match["revision"],
            allow_patterns=list(patterns),
            ignore_patterns=list(IGNORED),
        )
        return pathlib.Path(folder)

    with _errors_in_one_line(f"{name} is no folder here, and as a name on the Hub it"):
        folder = fetch(FILES)
        if not any(folder.glob("*.safetensors")):
            folder = fetch((*FILES, *PYTORCH_FILES))
    return Download(str(folder), f"{match['repository']}@{folder.name}")


def create_repository(name: str):
    """Makes the repository to upload to, if it does not exist. Raises as `download`."""
    import huggingface_hub as hub

    match = NAME.fullmatch(name)
    if match is None or match["revision"]:
        raise ConfigError(f"{name} is no name on the Hub. Give ORG/NAME")
    with _errors_in_one_line(f"the repository {name} of the Hub"):
        hub.HfApi().create_repo(name, exist_ok=True)


def upload(name: str, folder: str | os.PathLike) -> str:
    """Uploads a folder to a repository. Returns the address of the commit. Raises as `download`."""
    import huggingface_hub as hub

    with _errors_in_one_line(f"the repository {name} of the Hub"):
        return hub.HfApi().upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload an encoder of maelm_jax"
        )


@contextlib.contextmanager
def _errors_in_one_line(subject: str):
    """Context manager that makes one line of an error of huggingface_hub. `subject` begins it."""
    from huggingface_hub import errors

    try:
        yield
    except (
        errors.OfflineModeIsEnabled,
        errors.LocalEntryNotFoundError,  # its cause says why it was not fetched
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalTokenNotFoundError,
    ) as error:
        if errors.OfflineModeIsEnabled in (type(error), type(error.__cause__)):
            raise ConfigError(
                f"{subject} is not in the cache, and HF_HUB_OFFLINE is set: unset it, or give a "
                "folder"
            ) from error
        reason = " ".join(str(error).split())[:300]
        response = getattr(error, "response", None)
        is_fault_of_server = response is not None and response.status_code >= 500
        if is_fault_of_server or isinstance(error, errors.LocalEntryNotFoundError):
            raise RunError(f"{subject} cannot be reached ({reason})") from error
        raise ConfigError(
            f"{subject} is refused ({reason}). Correct it, or log in with hf auth login"
        ) from error
