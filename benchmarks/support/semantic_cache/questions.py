"""Questions with the intents that their askers had, encoded once and kept in a folder."""

import csv
import gzip
import hashlib
import json
import os
from pathlib import Path

import numpy as np
import torch

from maitred.engine.encoder.model import Encoder
from maitred.engine.similar.question import EncodedQuestion
from maitred.text.tokenizer import Tokenizer
from maitred.text.wording import Wording

BANKING = "banking77_train.csv.gz"
CLINC = "clinc150_train_val.jsonl.gz"
FILES = {"banking77": BANKING, "clinc150": CLINC}
ENCODER = "all-MiniLM-L6-v2"
_MOST_TOKENS = 128
_BATCH = 32


def read_questions(folder: Path, name: str) -> list[tuple[str, str]]:
    """Reads the questions of a set and their intents; questions out of scope have one intent each."""
    with gzip.open(folder / FILES[name], "rt", encoding="utf-8") as lines:
        if name == "banking77":
            return [(row["text"].strip(), row["category"]) for row in csv.DictReader(lines)]
        rows = [json.loads(line) for line in lines]
    return [
        (row["text"].strip(), f"oos {index}" if row["intent"] == "oos" else row["intent"])
        for index, row in enumerate(rows)
    ]


class QuestionEncoder:
    """Encoder of texts that keeps what it has computed.

    Args:
        folder: Folder of the model.
        kept: Folder of encodings that were computed before; None: nothing is kept.
    """

    def __init__(self, folder: Path, kept: Path | None) -> None:
        self._folder = folder
        self._kept = kept

    def encode(self, texts: list[str]) -> list[EncodedQuestion]:
        """Encodes texts."""
        digest = hashlib.sha256("\n".join([ENCODER, *texts]).encode()).hexdigest()[:16]
        file = None if self._kept is None else self._kept / f"{digest}.npz"
        if file is not None and file.is_file():
            with np.load(file) as kept:
                arrays = {name: kept[name] for name in ("vectors", "tokens", "ids", "starts")}
        else:
            arrays = self._computed(texts)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                # Processes that encode the same texts must not read each other's half.
                part = file.with_name(f"{file.stem}.{os.getpid()}.npz")
                np.savez(part, allow_pickle=False, **arrays)
                part.replace(file)
        starts = arrays["starts"]
        return [
            EncodedQuestion(
                text=text,
                wording=Wording.of(text),
                vector=arrays["vectors"][i],
                token_ids=arrays["ids"][starts[i] : starts[i + 1]],
                token_vectors=arrays["tokens"][starts[i] : starts[i + 1]],
            )
            for i, text in enumerate(texts)
        ]

    def _computed(self, texts: list[str]) -> dict[str, np.ndarray]:
        torch.set_num_threads(1)
        encoder = Encoder.load(self._folder, dtype=torch.float32, device=torch.device("cpu"))
        tokenizer = Tokenizer.load(self._folder)
        ids = [tokenizer.encode(text, add_special_tokens=True)[:_MOST_TOKENS] for text in texts]
        vectors = np.zeros((len(texts), encoder.dimensions), dtype=np.float32)
        tokens: list[np.ndarray] = [np.empty(0)] * len(texts)
        order = sorted(range(len(texts)), key=lambda i: len(ids[i]))
        for first in range(0, len(order), _BATCH):
            batch = order[first : first + _BATCH]
            pooled, rows = encoder.encode_with_tokens([ids[i] for i in batch])
            vectors[batch] = pooled.numpy()
            for i, row in zip(batch, rows, strict=True):
                tokens[i] = row[1:-1].numpy().astype(np.float16)
        return {
            "vectors": vectors,
            "tokens": np.concatenate(tokens),
            "ids": np.concatenate([np.array(text[1:-1], dtype=np.int64) for text in ids]),
            "starts": np.cumsum([0, *(len(row) for row in tokens)]),
        }
