"""Models named by their hub id, with a stub in place of the hub's client."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

import checkpoints
from checkpoints import hub
from tests.checkpoints.converting import contents, write_checkpoint
from tests.helpers import make_tokenizer

ID = "someone/Some-Qwen3.1"
INSTEAD = f"download it elsewhere (hf download {ID} --local-dir DIR) and give the folder"


@pytest.fixture
def stub(tmp_path, monkeypatch):
    """Return a snapshot that the stub hands out, and the calls of the stub."""
    snapshot = write_checkpoint(tmp_path / "cache" / "snapshot")
    make_tokenizer(snapshot)
    # The hub's cache links to its files.
    weights = snapshot / "model.safetensors"
    weights.rename(tmp_path / "cache" / "blob")
    weights.symlink_to(tmp_path / "cache" / "blob")
    calls = []

    def snapshot_download(*args, **kwargs):
        calls.append((args, kwargs))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    return snapshot, calls


def test_an_id_is_downloaded_and_loaded(stub):
    _, calls = stub
    model, tokenizer = checkpoints.load(ID)
    assert model.config.num_valid_tokens == len(tokenizer) == 21
    ((args, kwargs),) = calls
    assert args == (ID,)
    assert {"*.safetensors", "*.json"} <= set(kwargs["allow_patterns"])
    assert not {"*", "*.bin"} & set(kwargs["allow_patterns"])


def test_an_id_is_downloaded_and_converted(stub, tmp_path):
    snapshot, _ = stub
    checkpoints.convert(ID, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(snapshot)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    checkpoints.convert(tmp_path / "out", tmp_path / "back", to="hf")
    assert not any(path.is_symlink() for path in (tmp_path / "back").iterdir())


def test_directories_go_first(stub):
    snapshot, calls = stub
    shutil.copytree(snapshot, ID)
    checkpoints.load(ID)
    shutil.rmtree("someone")
    for path in (Path(ID), f"./{ID}", os.path.abspath(ID), "name", "a/b/c", "a//b", "../b", "a/.b"):
        with pytest.raises(FileNotFoundError) as raised:
            checkpoints.load(path)
        assert str(raised.value) == f"{Path(path)}: no such directory"
    assert calls == []


def raised_by_hub(kind: type[Exception], text: str = "first\nsecond") -> Exception:
    """Return an error of the hub's client, whose constructors differ between its releases."""
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "reason"),
    [
        (
            raised_by_hub(errors.GatedRepoError),
            PermissionError,
            ", and the model of this name on the Hugging Face hub is gated: accept its terms at "
            f"https://huggingface.co/{ID} and log in (hf auth login)",
        ),
        (
            raised_by_hub(errors.RepositoryNotFoundError),
            FileNotFoundError,
            " and no such model on the Hugging Face hub; if it is private, log in (hf auth login)",
        ),
        (
            errors.HFValidationError("too long\nmore"),
            FileNotFoundError,
            " and no valid hub id: too long",
        ),
        (
            raised_by_hub(errors.HfHubHTTPError, "429 Too Many Requests\nmore"),
            OSError,
            ", and the Hugging Face hub answered: 429 Too Many Requests",
        ),
        (
            errors.LocalEntryNotFoundError("offline\nmore"),
            ConnectionError,
            " or in the cache of the Hugging Face hub, which cannot be reached: check the network "
            f"and HF_HUB_OFFLINE, or {INSTEAD}",
        ),
        (
            errors.OfflineModeIsEnabled("offline"),
            ConnectionError,
            " or in the cache of the Hugging Face hub, which cannot be reached: check the network "
            f"and HF_HUB_OFFLINE, or {INSTEAD}",
        ),
        (
            RuntimeError("name resolution\nfailed"),
            ConnectionError,
            ", and the Hugging Face hub cannot be reached (name resolution): check the network, or "
            + INSTEAD,
        ),
        (
            TimeoutError(),
            ConnectionError,
            ", and the Hugging Face hub cannot be reached (TimeoutError): check the network, or "
            + INSTEAD,
        ),
    ],
)
def test_errors_of_the_hub_are_one_line(stub, monkeypatch, error, kind, reason):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind) as raised:
        checkpoints.load(ID)
    assert str(raised.value) == f"{ID}: no such directory here{reason}"


def test_an_entry_that_is_not_cached_under_huggingface_hub_0(stub, monkeypatch):
    class HTTPError(OSError):
        pass

    class EntryNotFoundError(HTTPError):
        pass

    class LocalEntryNotFoundError(EntryNotFoundError, FileNotFoundError, ValueError):
        pass

    def fail(*_, **__):
        raise LocalEntryNotFoundError("offline\nmore")

    monkeypatch.setattr(errors, "HfHubHTTPError", HTTPError)
    monkeypatch.setattr(errors, "LocalEntryNotFoundError", LocalEntryNotFoundError)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConnectionError, match="check the network and HF_HUB_OFFLINE, or download"):
        checkpoints.load(ID)


def test_a_directory_that_was_moved_aside_is_no_id(stub):
    _, calls = stub
    aside = Path("someone", ".Some-Qwen3.1.old-another.host-0123abcd-42")
    aside.mkdir(parents=True)
    with pytest.raises(FileNotFoundError) as raised:
        checkpoints.load(ID)
    assert str(raised.value) == (
        f"{ID}: no such directory; a killed conversion left the old one at {aside}: rename it back"
    )
    assert calls == []


def test_errors_of_the_disk_stay_what_they_are(stub, monkeypatch):
    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left on device$"):
        checkpoints.load(ID)


def test_the_real_client_offline(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError) as raised:
        hub.find_directory(ID)
    assert str(raised.value) == (
        f"{ID}: no such directory here or in the cache of the Hugging Face hub, which cannot be "
        f"reached: check the network and HF_HUB_OFFLINE, or {INSTEAD}"
    )


def test_a_snapshot_without_safetensors(stub):
    snapshot, _ = stub
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError) as raised:
        checkpoints.load(ID)
    assert str(raised.value) == (
        f"{snapshot}: no weights (model.safetensors or model.safetensors.index.json expected)"
    )
