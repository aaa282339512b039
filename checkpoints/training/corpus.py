"""Permissively licensed Python source that is installed on this machine, as training documents."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import platform
import re
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from pathlib import Path
from typing import cast

import numpy as np

PERMISSIVE_LICENCES = frozenset(
    """0BSD Apache-2.0 BSD BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC MIT MIT-0
    MIT-CMU PSF-2.0 Python-2.0 Unlicense Zlib""".split()
)

# Trove classifiers by their last part, and the free-text spellings of the `License` field.
_PERMISSIVE_NAMES = re.compile(
    r"^(the )?(\(?new\)? |modified |3-clause |2-clause )?"
    r"(0bsd|apache|bsd|mit\b|isc\b|psf\b|python software foundation|historical permission|hpnd"
    r"|zlib|unlicense|cc0|boost|simplified bsd|public domain)",
    re.IGNORECASE,
)
_PERMISSIVE_TEXTS = (
    "Permission is hereby granted, free of charge",
    "Redistribution and use in source and binary forms",
    "Apache License",
)
_RESTRICTED = re.compile(
    r"\b(A?GPL|LGPL|GNU|MPL|Mozilla|Proprietary|EULA|EUPL|CC[- ]BY|Commercial|NVIDIA)",
    re.IGNORECASE,
)
_RESTRICTED_HEADER = re.compile(
    r"GNU (Affero |Lesser |Library )?(General )?Public|\bA?L?GPL|Mozilla Public|NonCommercial"
    r"|non-commercial|NvidiaProprietary|retain all intellectual property",
    re.IGNORECASE,
)
_GENERATED_HEADER = re.compile(
    r"(auto|machine)[- ]?(matically )?[- ]?generated|generated (by|from)|do not (edit|modify)"
    r"|@generated",
    re.IGNORECASE,
)
_SKIPPED_FOLDERS = frozenset(
    """_vendor _vendored vendor vendored extern externals _externals third_party thirdparty
    node_modules __pycache__ site-packages dist-packages pydoc_data locales""".split()
)
_STDLIB_SKIPPED = frozenset(["test", "tests", "idle_test", "lib2to3", "turtledemo", "encodings"])


@dataclasses.dataclass(frozen=True)
class Source:
    """One installed distribution, or the standard library."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


@dataclasses.dataclass(frozen=True)
class Document:
    """The text of one file and the name of its source."""

    source: str
    text: str


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents to train on, held-out documents, the sources used and why files were dropped."""

    train: list[Document]
    held_out: list[Document]
    sources: list[Source]
    dropped: Counter[str]


def permissive_licence(
    expression: str | None, licence: str | None, classifiers: Sequence[str] = ()
) -> str | None:
    """Return the name of a distribution's licence, or None where it is not known permissive.

    Args:
      expression: the metadata's `License-Expression`, which decides alone where it is present:
        all parts of an AND and one part of an OR must be permissive.
      licence: the `License` field, a name or a whole text; used where there are no classifiers.
      classifiers: the trove classifiers; all that speak of licences must be permissive.
    """
    if expression:
        parts = [part.strip() for part in re.split(r"\bAND\b", expression)]
        return expression if all(_has_permissive_choice(part) for part in parts) else None
    names = [line.split("::")[-1].strip() for line in classifiers if line.startswith("License ::")]
    names = [name for name in names if name != "OSI Approved"]
    text = (licence or "").strip()
    first_line = text.split("\n")[0]
    if names:
        if len(text) < 200 and _RESTRICTED.search(text):
            return None
        is_permissive = all(_PERMISSIVE_NAMES.match(x) and not _RESTRICTED.search(x) for x in names)
        return ", ".join(names) if is_permissive else None
    if _RESTRICTED.search(first_line):
        return None
    if _PERMISSIVE_NAMES.match(first_line):
        return first_line[:60]
    is_known_text = any(known in text for known in _PERMISSIVE_TEXTS)
    return first_line[:60] if is_known_text and not _RESTRICTED_HEADER.search(text) else None


def _has_permissive_choice(part: str) -> bool:
    choices = re.split(r"\bOR\b", part.strip("() "))
    return any(choice.split(" WITH ")[0].strip("() ") in PERMISSIVE_LICENCES for choice in choices)


def installed_sources(names: Iterable[str] | None = None) -> list[Source]:
    """Return the permissively licensed distributions of this interpreter and its standard library.

    Args:
      names: lower-case distribution names to look at ("python" = the standard library); None = all.
    """
    wanted = None if names is None else set(names)
    sources: dict[str, Source] = {}
    for distribution in importlib.metadata.distributions():
        meta = cast(Message, distribution.metadata)
        name = (meta.get("Name") or "").lower().replace("_", "-")
        if not name or name in sources or (wanted is not None and name not in wanted):
            continue
        licence = permissive_licence(
            meta.get("License-Expression"), meta.get("License"), meta.get_all("Classifier") or ()
        )
        if licence is None or name.startswith("nvidia"):
            continue
        files = tuple(sorted(_distribution_files(distribution)))
        if files:
            sources[name] = Source(name, distribution.version, licence, files)
    if wanted is None or "python" in wanted:
        sources["python"] = _standard_library()
    return [sources[name] for name in sorted(sources)]


def _distribution_files(distribution: importlib.metadata.Distribution) -> Iterator[Path]:
    for file in distribution.files or ():
        if file.suffix == ".py" and ".." not in file.parts:
            if not _SKIPPED_FOLDERS.intersection(file.parts):
                yield Path(str(distribution.locate_file(file)))


def _standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = _SKIPPED_FOLDERS | _STDLIB_SKIPPED
    files = (p for p in root.rglob("*.py") if not skipped.intersection(p.relative_to(root).parts))
    return Source("python", platform.python_version(), "PSF-2.0", tuple(sorted(files)))


def clean_text(text: str) -> str:
    """Return a file's text with Unix newlines and without a leading licence comment."""
    lines = text.replace("\r\n", "\n").lstrip("\ufeff").split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    header = "\n".join(lines[:end]).lower()
    if "copyright" in header or "license" in header or "licence" in header:
        lines = lines[end:]
    return "\n".join(lines).strip("\n") + "\n"


def rejection(text: str) -> str | None:
    """Return why a file's raw text is unfit for training, or None.

    Repetitive files, tables and generated code teach a small model to loop.
    """
    if not 200 <= len(text) <= 400_000:
        return "size"
    header = text[:3000]
    if _RESTRICTED_HEADER.search(header):
        return "licence"
    if _GENERATED_HEADER.search(header):
        return "generated"
    lines = text.split("\n")
    if max(map(len, lines)) > 500 or len(text) > 90 * len(lines):
        return "long lines"
    if sum(map(text.count, "0123456789")) > 0.10 * len(text):
        return "digits"
    data = text.encode("utf-8", "surrogatepass")
    if len(data) > 1.03 * len(text):
        return "not ascii"
    if _is_repetitive(data, lines):
        return "repetitive"
    return None


def _is_repetitive(data: bytes, lines: list[str]) -> bool:
    if len(data) > 2000 and len(zlib.compress(data, 6)) < 0.14 * len(data):
        return True
    stripped = [line.strip() for line in lines if len(line.strip()) >= 8]
    return len(stripped) > 40 and len(set(stripped)) < 0.6 * len(stripped)


class SeenLines:
    """Line and content hashes of the files kept so far, to drop copies and near copies."""

    def __init__(self) -> None:
        self._contents: set[bytes] = set()
        self._lines: set[int] = set()

    def admit(self, text: str, *, max_seen: float = 0.7) -> bool:
        """Return whether at most `max_seen` of the text's lines are known; if so, learn them."""
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        lines = [hash(line.strip()) for line in text.split("\n") if len(line.strip()) >= 12]
        num_seen = sum(line in self._lines for line in lines)
        if digest in self._contents or num_seen > max_seen * len(lines):
            return False
        self._contents.add(digest)
        self._lines.update(lines)
        return True


def _read(path: Path) -> tuple[str | None, str]:
    """Return (why dropped or None, cleaned text) of one file."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return "unreadable", ""
    reason = rejection(text)
    if reason is not None:
        return reason, ""
    text = clean_text(text)
    return ("size", "") if len(text) < 200 else (None, text)


def collect(
    sources: Sequence[Source],
    *,
    held_out: Sequence[str],
    max_source_bytes: int = 20_000_000,
    max_bytes: int | None = None,
    seed: int = 0,
) -> Corpus:
    """Read, filter and deduplicate the sources' files.

    Args:
      sources: what to read.
      held_out: names of sources kept for evaluation; read first, so that copies of their files
        elsewhere are dropped from training.
      max_source_bytes: most text of one source, so that none dominates.
      max_bytes: most training text in all; None = no limit.
      seed: of the order in which a source's files are taken, and of the documents' order.
    """
    rng = np.random.default_rng(seed)
    seen = SeenLines()
    corpus = Corpus([], [], [], Counter())
    # Sources other than the held-out ones come in random order, which only a limit makes matter.
    order = rng.permutation(len(sources))
    for source in sorted((sources[i] for i in order), key=lambda s: s.name not in held_out):
        texts = _admitted(source, seen, corpus.dropped, max_source_bytes, rng)
        documents = [Document(source.name, text) for text in texts]
        if documents:
            corpus.sources.append(source)
        (corpus.held_out if source.name in held_out else corpus.train).extend(documents)
        if max_bytes is not None and sum(len(d.text) for d in corpus.train) > max_bytes:
            break
    corpus.sources.sort(key=lambda source: source.name)
    rng.shuffle(corpus.train)  # type: ignore[arg-type]
    return corpus


def _admitted(
    source: Source,
    seen: SeenLines,
    dropped: Counter[str],
    max_bytes: int,
    rng: np.random.Generator,
) -> list[str]:
    files = [source.files[i] for i in rng.permutation(len(source.files))]
    texts: list[str] = []
    num_bytes = 0
    with ThreadPoolExecutor(16) as pool:
        for reason, text in pool.map(_read, files):
            if reason is None and num_bytes > max_bytes:
                reason = "source limit"
            if reason is None and not seen.admit(text):
                reason = "duplicate"
            if reason is not None:
                dropped[reason] += 1
                continue
            texts.append(text)
            num_bytes += len(text)
    return texts
