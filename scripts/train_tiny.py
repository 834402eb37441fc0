"""Train maitred-tiny, the bundled model, from text that may be redistributed.

    python scripts/train_tiny.py --text DIR --out DIR (--steps N | --minutes M | --until HH:MM)

With `--steps` a run is a function of its seed. With `--minutes` or `--until` the learning rate
follows the clock instead, so that it reaches zero exactly when the time is up, however busy the
machine is; the steps taken are recorded. A run that was interrupted goes on from the checkpoint in
`--work` when the same command is given again. The weights that score best on the held-out text are
exported, then measured as exported.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from tiny_model.batches import (
    Ids,
    Rows,
    scored_dialogues,
    scored_windows,
    training_texts,
)
from tiny_model.corpus import HELD_OUT_FRACTION, Book, Corpus, read_corpus
from tiny_model.export import folder_bytes, read_model, write_card, write_model
from tiny_model.llama import Llama, Shape
from tiny_model.measure import Bigram, Score, score_model
from tiny_model.muon import Muon
from tiny_model.vocabulary import CONTEXT_TOKENS, train_tokenizer
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).resolve().parent.parent

SHORT_ROW_TOKENS = 512
LONG_ROW_SHARE = 0.08  # the last part of the run, on rows of the full context
MUON_LR, ADAM_LR = 0.02, 4e-3
WARMUP_STEPS = 20
DECAY_FROM = 0.5  # share of the run at full learning rate; then straight down to zero
SCORE_WINDOW_TOKENS = 1024
WATCHED_SHARE = 8  # one held-out window in so many is scored during training
CHECKPOINT_EVERY_S = 480.0


@dataclass
class Progress:
    """Where a run stands; everything a checkpoint needs beside the weights."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0
    epoch: int = 0
    row: int = 0
    row_tokens: int = SHORT_ROW_TOKENS
    best_perplexity: float = math.inf
    commands: list[str] = field(default_factory=list)
    history: list[dict[str, float]] = field(default_factory=list)


def main() -> None:
    """Train, export, measure."""
    options = _parse_options()
    torch.manual_seed(options.seed)
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    try:
        corpus = read_corpus(options.text)
    except FileNotFoundError as error:
        sys.exit(str(error))
    tokenizer = train_tokenizer(training_texts(corpus))
    best = train(corpus, tokenizer, options)
    print(report(corpus, tokenizer, best, options))


def train(corpus: Corpus, tokenizer: Tokenizer, options: argparse.Namespace) -> Path:
    """Run to the end of the budget; return the checkpoint that holds the best weights."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Llama(Shape()).to(device)
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = Muon(matrices, lr=MUON_LR)
    adam = torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)

    work: Path = options.work
    checkpoint, best = work / "last.pt", work / "best.pt"
    progress = Progress()
    if checkpoint.exists():
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        muon.load_state_dict(saved["muon"])
        adam.load_state_dict(saved["adam"])
        progress = Progress(**saved["progress"])
        print(f"resumed at step {progress.step}", flush=True)
    progress.commands.append(shlex.join(["python", "scripts/train_tiny.py", *sys.argv[1:]]))

    rows = Rows(corpus, tokenizer, options.seed)
    done = _budget(options, progress)
    watched = [w for windows in held_out(corpus, tokenizer).values() for w in windows[::WATCHED_SHARE]]
    # Fusing the small operations is worth a fifth; the few long rows do not repay compiling again.
    short_loss = torch.compile(model.loss, dynamic=False) if options.compile else model.loss
    started, evaluated_s, running = time.monotonic() - progress.elapsed_s, progress.elapsed_s, math.nan
    epoch_rows: Ids | None = None

    def checkpoint_now() -> None:
        nonlocal evaluated_s
        model.eval()
        score = score_model(model, watched)
        perplexity = score.perplexity
        model.train()
        progress.elapsed_s = evaluated_s = time.monotonic() - started
        entry = {"step": progress.step, "tokens": progress.tokens, "batch_tokens": options.batch_tokens}
        entry |= {"held_out_tokens": score.tokens, "held_out_perplexity": round(perplexity, 3)}
        progress.history.append(entry | {"elapsed_s": round(progress.elapsed_s, 1)})
        state: dict[str, Any] = {"model": model.state_dict(), "progress": asdict(progress)}
        if perplexity < progress.best_perplexity:
            progress.best_perplexity = perplexity
            state["progress"] = asdict(progress)
            torch.save(state, best)
        state |= {"muon": muon.state_dict(), "adam": adam.state_dict()}
        torch.save(state, checkpoint.with_suffix(".part"))
        checkpoint.with_suffix(".part").replace(checkpoint)
        print(f"step {progress.step} held-out perplexity {perplexity:.2f}", flush=True)

    while (fraction := done(time.monotonic() - started, progress.step)) < 1:
        if fraction >= 1 - LONG_ROW_SHARE and progress.row_tokens == SHORT_ROW_TOKENS:
            progress.epoch, progress.row, progress.row_tokens = progress.epoch + 1, 0, CONTEXT_TOKENS
            epoch_rows = None
        if epoch_rows is None:
            epoch_rows = rows.epoch(progress.epoch, progress.row_tokens)
        count = options.batch_tokens // progress.row_tokens
        batch = torch.from_numpy(epoch_rows[progress.row : progress.row + count]).to(device)
        progress.row += count
        if progress.row + count > len(epoch_rows):
            progress.epoch, progress.row, epoch_rows = progress.epoch + 1, 0, None

        rate = min(1.0, (1 - fraction) / (1 - DECAY_FROM), (progress.step + 1) / WARMUP_STEPS)
        for optimiser, peak in ((muon, MUON_LR), (adam, ADAM_LR)):
            for group in optimiser.param_groups:
                group["lr"] = peak * rate
        measure = short_loss if progress.row_tokens == SHORT_ROW_TOKENS else model.loss
        loss = measure(batch[:, :-1], batch[:, 1:])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(others, 1.0)
        for optimiser in (muon, adam):
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)

        progress.step += 1
        progress.tokens += batch[:, 1:].numel()
        value = float(loss.drain())
        running = value if math.isnan(running) else 0.95 * running + 0.05 * value
        now_s = time.monotonic() - started
        if progress.step % 20 == 0:
            print(
                f"step {progress.step} {fraction:.3f} loss {running:.3f} epoch {progress.epoch}"
                f" {progress.tokens / now_s:.0f} tokens/s",
                flush=True,
            )
        if now_s - evaluated_s > CHECKPOINT_EVERY_S:
            checkpoint_now()
    checkpoint_now()
    return best


def report(corpus: Corpus, tokenizer: Tokenizer, best: Path, options: argparse.Namespace) -> str:
    """Export the best weights, measure the export, write the card and the figures."""
    saved = torch.load(best, map_location="cpu", weights_only=True)
    model = Llama(Shape())
    model.load_state_dict(saved["model"])
    write_model(model, tokenizer, options.out)
    model = read_model(options.out, Shape())

    bigram = Bigram(_training_windows(corpus, tokenizer))
    sources = held_out(corpus, tokenizer)
    scores = {name: (score_model(model, windows), bigram.score(windows)) for name, windows in sources.items()}
    everything = [window for windows in sources.values() for window in windows]
    total = sum((ours for ours, _ in scores.values()), start=Score(0.0, 0))
    scores["overall"] = (total, bigram.score(everything))
    progress = Progress(**saved["progress"])
    by_context = {
        str(length): score_model(model, _book_windows(corpus, tokenizer, length)).perplexity
        for length in (SHORT_ROW_TOKENS, CONTEXT_TOKENS - 1)
    }
    facts = {
        "held_out_percent": 100 * HELD_OUT_FRACTION,
        "window": SCORE_WINDOW_TOKENS,
        "tokens_m": progress.tokens / 1e6,
        "passes": progress.tokens / Rows(corpus, tokenizer, options.seed).epoch(0, SHORT_ROW_TOKENS).size,
        "row_tokens": progress.row_tokens,
        "by_context": ", ".join(f"{value:.1f} ({length} tokens)" for length, value in by_context.items()),
        "steps": progress.step,
        "minutes": progress.elapsed_s / 60,
        "machine": _machine(options.threads),
        "seed": options.seed,
    }
    write_card(model, tokenizer, options.out, scores, facts)
    result = {
        "benchmark": "train_tiny",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _commit(),
        "machine": facts["machine"],
        "seed": options.seed,
        "commands": progress.commands,
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "folder_bytes": folder_bytes(options.out),
        "training": {
            "seconds": round(progress.elapsed_s, 1),
            "steps": progress.step,
            "tokens_seen": progress.tokens,
            "tokens_per_second": round(progress.tokens / max(progress.elapsed_s, 1e-9)),
            "passes": round(facts["passes"], 2),
            "longest_row_tokens": progress.row_tokens,
            "held_out_during_training": progress.history,
        },
        "held_out": {
            "window_tokens": SCORE_WINDOW_TOKENS,
            "sources": {name: _figures(*pair) for name, pair in scores.items()},
            "books_perplexity_by_window_tokens": {k: round(v, 3) for k, v in by_context.items()},
        },
    }
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    ours, baseline = scores["overall"]
    return (
        f"held-out perplexity {ours.perplexity:.1f}, bigram {baseline.perplexity:.1f};"
        f" {folder_bytes(options.out):,} bytes"
    )


def held_out(corpus: Corpus, tokenizer: Tokenizer) -> dict[str, list[Ids]]:
    """Source -> the windows that are scored."""
    return {
        "books": _book_windows(corpus, tokenizer, SCORE_WINDOW_TOKENS),
        "plays": scored_windows(corpus.plays.held_out, tokenizer, SCORE_WINDOW_TOKENS),
        "coffee dialogues": scored_dialogues(corpus.held_out_dialogues, tokenizer),
    }


def _book_windows(corpus: Corpus, tokenizer: Tokenizer, length_tokens: int) -> list[Ids]:
    documents = [document for book in corpus.books for document in book.held_out]
    return scored_windows(documents, tokenizer, length_tokens)


def _training_windows(corpus: Corpus, tokenizer: Tokenizer) -> list[Ids]:
    books: list[Book] = [*corpus.books, corpus.plays]
    documents = [document for book in books for document in book.train]
    return scored_windows(documents, tokenizer, SCORE_WINDOW_TOKENS) + scored_dialogues(corpus.dialogues, tokenizer)


def _budget(options: argparse.Namespace, progress: Progress) -> Callable[[float, int], float]:
    """The share of the run that is done, from (elapsed seconds, steps)."""
    if options.steps:
        return lambda elapsed_s, step: step / options.steps
    total_s = 60.0 * (options.minutes or 0)
    if options.until:
        now = datetime.datetime.now(datetime.UTC)
        hour, minute = map(int, options.until.split(":"))
        end = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
        if end <= now:
            end += datetime.timedelta(days=1)
        total_s = progress.elapsed_s + (end - now).total_seconds()
    return lambda elapsed_s, step: elapsed_s / total_s


def _figures(ours: Score, bigram: Score) -> dict[str, float]:
    return {
        "tokens": ours.tokens,
        "perplexity": round(ours.perplexity, 3),
        "bigram_perplexity": round(bigram.perplexity, 3),
        "ratio_to_bigram": round(ours.perplexity / bigram.perplexity, 4),
    }


def _machine(threads: int) -> str:
    if torch.cuda.is_available():
        return f"on one {torch.cuda.get_device_name()}"
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else name
    return f"on {threads} threads of a shared {os.cpu_count()}-core {name}"


def _commit() -> str:
    """The commit that was checked out, or "unknown" outside a repository."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train maitred-tiny, the bundled model.")
    default_text = REPOSITORY.parent / "shared" / "data" / "text"
    bundled = REPOSITORY / "src" / "maitred" / "bundled" / "maitred-tiny"
    results = REPOSITORY / "benchmarks" / "results" / "train_tiny.json"
    work = Path(tempfile.gettempdir()) / "maitred-tiny"
    parser.add_argument("--text", type=Path, default=default_text, help="folder of the text files")
    parser.add_argument("--out", type=Path, default=bundled, help="model folder to write")
    parser.add_argument("--results", type=Path, default=results, help="JSON of figures to write")
    parser.add_argument("--work", type=Path, default=work, help="folder for checkpoints")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="train this many steps")
    budget.add_argument("--minutes", type=float, help="train this long")
    budget.add_argument("--until", metavar="HH:MM", help="train until this time, UTC")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per step")
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    return parser.parse_args()


if __name__ == "__main__":
    main()
