"""Prepare the training text: Debian packages dict-gcide and anarchism, byte-pair encoded to uint16 files.

python benchmarks/prepare_text.py --out out/text

Writes train.bin, valid.bin (token ids, uint16, documents in order), tokenizer.json and meta.json (package versions,
hashes, sizes in bytes and tokens). The last twentieth of each source is held out. Needs apt-get, dpkg-deb and the
package `tokenizers`; --debs names a folder with the packages, to work without a network.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import json
import re
import subprocess
import tempfile
from pathlib import Path

import numpy as np

PACKAGES = ("dict-gcide", "anarchism")
HELD_OUT = 20
PIECE = 1 << 16


def fetch(folder: Path) -> dict[str, Path]:
    """Package → .deb in `folder`, downloaded with apt-get where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name in PACKAGES:
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "download", name], cwd=folder, check=True)
        (found[name],) = folder.glob(f"{name}_*.deb")
    return found


def gcide(root: Path) -> str:
    """The dictionary's text, which is one gzip-compatible file."""
    raw = gzip.decompress((root / "usr/share/dictd/gcide.dict.dz").read_bytes())
    return raw.decode("utf-8", "replace")


def anarchism(root: Path) -> str:
    """The FAQ's pages in order of their names, tags and entities removed."""
    pages = []
    for path in sorted((root / "usr/share/doc/anarchism/html").rglob("*.html")):
        page = path.read_text("utf-8", "replace")
        page = re.sub(r"(?is)<(script|style|head)\b.*?</\1>", " ", page)
        page = re.sub(r"(?i)<(p|br|h\d|li|div|tr)\b[^>]*>", "\n", page)
        page = html.unescape(re.sub(r"(?s)<[^>]*>", " ", page))
        page = re.sub(r"[ \t\r\f\xa0]+", " ", page)
        pages.append(re.sub(r" ?\n[ \n]*", "\n", page).strip())
    return "\n\n".join(pages)


def pieces(text: str) -> list[str]:
    """The text in pieces that end at a line's end, so that encoding them one by one changes nothing that matters."""
    found, start = [], 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1
        end = end if end > 0 else len(text)
        found.append(text[start:end])
        start = end
    return found


def train_tokenizer(texts: list[str], vocab: int):
    """Byte-level BPE: every text can be encoded, and decoding gives it back."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator((p for text in texts for p in pieces(text)), trainer)
    return tokenizer


def encode(tokenizer, text: str) -> np.ndarray:
    """Token ids of a text, uint16."""
    ids = [np.asarray(e.ids, np.uint16) for e in tokenizer.encode_batch(pieces(text))]
    return np.concatenate(ids)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out/text"))
    parser.add_argument("--debs", type=Path, help="folder of the .deb files; they are downloaded there if missing")
    parser.add_argument("--vocab", type=int, default=8192)
    options = parser.parse_args()
    if not 257 <= options.vocab <= 65536:
        parser.error(f"--vocab: found {options.vocab}, expected 257 to 65536")
    debs = fetch(options.debs or options.out / "debs")
    texts = {}
    for name, read in (("dict-gcide", gcide), ("anarchism", anarchism)):
        with tempfile.TemporaryDirectory() as root:
            subprocess.run(["dpkg-deb", "-x", str(debs[name]), root], check=True)
            texts[name] = read(Path(root))
    splits = {
        "train": [text[: len(text) - len(text) // HELD_OUT] for text in texts.values()],
        "valid": [text[len(text) - len(text) // HELD_OUT :] for text in texts.values()],
    }
    tokenizer = train_tokenizer(splits["train"], options.vocab)
    meta = {
        "vocab": tokenizer.get_vocab_size(),
        "packages": {name: {"file": path.name, "sha256": digest(path)} for name, path in debs.items()},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out / "tokenizer.json"))
    for split, parts in splits.items():
        ids = np.concatenate([encode(tokenizer, part) for part in parts])
        path = options.out / f"{split}.bin"
        ids.tofile(path)
        size = sum(len(part.encode()) for part in parts)
        meta[split] = {"tokens": len(ids), "bytes": size, "sha256": digest(path)}
    (options.out / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    print(json.dumps(meta, indent=1))


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main()
